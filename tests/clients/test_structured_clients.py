"""instructor and outlines, which ask for structured answers with other servers' fields too."""

import json
import re
from collections.abc import Iterator
from typing import Annotated

import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.process import MODEL, Server

instructor = pytest.importorskip("instructor", reason="instructor is in the extra `clients`")
outlines = pytest.importorskip("outlines", reason="outlines is in the extra `clients`")

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]


class Person(BaseModel):
    """The requested schema; unbounded, the bundled model could write a name without end."""

    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=120)]


QUESTION = "Tell me about Anna the fox."


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_instructor(client: openai.OpenAI, mode: str) -> None:
    wrapped = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    person = wrapped.chat.completions.create(
        model=MODEL,
        response_model=Person,
        messages=[{"role": "user", "content": QUESTION}],
        max_retries=0,
        max_tokens=100,
        temperature=0,
    )
    assert isinstance(person, Person)


@pytest.mark.parametrize("server_name", ["vllm", "sglang"])
def test_outlines(client: openai.OpenAI, server_name: str) -> None:
    model = getattr(outlines, f"from_{server_name}")(client, MODEL)
    pattern = "[A-Z][a-z]{2,8} is [0-9]{1,2}"
    options = {"max_tokens": 100, "temperature": 0}
    said = model(QUESTION, outlines.types.Regex(pattern), **options)
    assert re.fullmatch(pattern, said)
    grammar = outlines.types.CFG('root ::= "yes" | "no"')
    assert model(QUESTION, grammar, **options) in ("yes", "no")
    bounded = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = outlines.types.JsonSchema(json.dumps(bounded))
    assert json.loads(model(QUESTION, form, **options)).keys() == {"n"}
