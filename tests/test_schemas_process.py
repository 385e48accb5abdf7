"""200 JSON schemas through the API, four at a time: valid answers, equal with and without MTP."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.sampling.params import MAX_LOGIT_BIAS
from mlx_mtp.text.tokenizer import Tokenizer
from tests.support.harness import MEASURED
from tests.support.process import MODEL, Server, running

SCHEMAS = Path(__file__).parent / "data" / "json_schemas.json"
QUIET = ("--dtype", "float32", "--log-level", "warning")
DEPTH = ("--enable-mtp", "--mtp-num-draft-tokens", "3")


def bias() -> dict[str, float]:
    """Returns a bias towards ends of values, as the bundled model tells stories in each string."""

    def push(text: bytes) -> float:
        if not text.strip():
            return -4.0
        return 8.0 if b'"' in text or text.strip()[-1:] in b"}]" else 0.0

    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    pushes = [(str(t), push(tokenizer.token_bytes(t))) for t in range(tokenizer.vocab_size)]
    return dict(sorted(pushes, key=lambda item: -item[1])[:MAX_LOGIT_BIAS])


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_answers_are_valid_and_the_same_with_mtp_on_and_off():
    cases = json.loads(Path(os.environ.get("MLX_MTP_JSON_SCHEMAS", SCHEMAS)).read_text("utf-8"))
    pushes, drafts = bias(), [0, 0]

    def answer(server: Server, case: dict[str, Any]) -> tuple[str, str]:
        """Returns the finish reason and the content, or "refused" and the error's code."""
        form = {"name": "answer", "schema": case["schema"], "strict": True}
        messages = [{"role": "user", "content": f"Fill in {case['name']}."}]
        fields = {"temperature": 0, "frequency_penalty": 0.2, "max_tokens": 300}
        fields |= {"response_format": {"type": "json_schema", "json_schema": form}}
        try:
            completion = server.client.chat.completions.create(
                model=MODEL, messages=messages, logit_bias=pushes, **fields
            )
        except openai.BadRequestError as error:
            return "refused", str(error.code)
        timings = completion.model_dump()["timings"]
        drafts[0] += timings.get("draft_n_accepted", 0)
        drafts[1] += timings.get("draft_n", 0)
        return completion.choices[0].finish_reason, completion.choices[0].message.content

    with (
        running(*DEPTH, *QUIET) as mtp,
        running("--no-enable-mtp", *QUIET) as plain,
        ThreadPoolExecutor(4) as pool,
    ):
        on, off = (list(pool.map(partial(answer, server), cases)) for server in (mtp, plain))
    num_valid = 0
    for case, (reason, content) in zip(cases, on, strict=True):
        if reason == "stop":
            jsonschema.validate(json.loads(content), case["schema"])
            num_valid += 1
        else:
            assert (reason, content) == ("refused", "invalid_grammar") or reason == "length"
    MEASURED.append(f"{num_valid} of {len(cases)} answers over HTTP ended: valid")
    MEASURED.append(f"drafts accepted under JSON schemas, depth 3: {drafts[0] / drafts[1]:.2f}")
    assert [case["name"] for case, a, b in zip(cases, on, off, strict=True) if a != b] == []
    assert num_valid >= 0.85 * len(cases)
    assert drafts[0] > 0.3 * drafts[1]
