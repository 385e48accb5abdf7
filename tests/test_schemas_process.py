"""200 JSON schemas through the API, four at a time: valid, and the same with MTP on and off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.sampling.params import MAX_LOGIT_BIAS
from mlx_mtp.server.tokenizer import Tokenizer
from tests.engine.test_json_schemas import MAX_TOKENS, SCHEMAS, push
from tests.harness import MEASURED
from tests.process import Server, running

QUIET = ("--dtype", "float32", "--log-level", "warning")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    depth = ("--enable-mtp", "--mtp-num-draft-tokens", "3")
    with running(*depth, *QUIET) as first, running(*QUIET) as second:
        yield {"on": first, "off": second}


def bias() -> dict[str, float]:
    """A push towards the ends of things, as the bundled model tells stories in each string."""
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    pushes = {str(t): push(tokenizer.token_bytes(t)) for t in range(tokenizer.vocab_size)}
    wanted = sorted(pushes.items(), key=lambda item: -item[1])
    return {token: value for token, value in wanted[:MAX_LOGIT_BIAS] if value}


def answer(server: Server, case: dict[str, Any], pushes: dict[str, float]) -> tuple[str, str]:
    """Finish reason and content; a refusal is told by its code."""
    form = {"name": "answer", "schema": case["schema"], "strict": True}
    try:
        completion = server.client.chat.completions.create(
            model="mlx-mtp-demo",
            messages=[{"role": "user", "content": f"Fill in {case['name']}."}],
            response_format={"type": "json_schema", "json_schema": form},
            temperature=0,
            frequency_penalty=0.2,
            max_tokens=MAX_TOKENS,
            logit_bias=pushes,
        )
    except openai.BadRequestError as error:
        return "refused", str(error.code)
    (choice,) = completion.choices
    return choice.finish_reason, choice.message.content


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_answers_are_valid_and_the_same_with_mtp_on_and_off(servers: dict[str, Server]) -> None:
    cases, pushes = json.loads(SCHEMAS.read_text("utf-8")), bias()

    def answers(name: str) -> list[tuple[str, str]]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda case: answer(servers[name], case, pushes), cases))

    on, off = answers("on"), answers("off")
    num_valid = 0
    for case, (reason, content) in zip(cases, on):
        if reason == "stop":
            jsonschema.validate(json.loads(content), case["schema"])
            num_valid += 1
        else:
            assert (reason, content) == ("refused", "invalid_grammar") or reason == "length"
    MEASURED.append(f"{num_valid} of {len(cases)} answers over HTTP ended: valid")
    assert [case["name"] for case, a, b in zip(cases, on, off) if a != b] == []
    assert num_valid >= 0.7 * len(cases)
