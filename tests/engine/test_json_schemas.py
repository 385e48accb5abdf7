"""200 JSON schemas: each answer is valid, and the same with MTP on and off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request
from mlx_mtp.errors import GrammarError
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.grammar import GrammarCompiler
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from mlx_mtp.server.tokenizer import Tokenizer
from tests.harness import MEASURED, Driver, Ties, plain, request

SCHEMAS = Path(__file__).parents[1] / "data" / "json_schemas.json"
MAX_TOKENS = 300
ROWS = 16


@pytest.fixture(scope="module")
def tokenizer(demo_model: LoadedModel) -> Tokenizer:
    return Tokenizer.load(demo_model.path)


@pytest.fixture(scope="module")
def cases(demo_model: LoadedModel, tokenizer: Tokenizer) -> dict[str, tuple[dict, Request]]:
    """Schema and request by name."""
    compiler = GrammarCompiler(tokenizer.to_json(), demo_model.eos_token_ids)
    # The bundled model tells stories in each string: a push towards the ends of things.
    bias = {token: push(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)}
    sampling = SamplingParams(
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        frequency_penalty=0.2,
        logit_bias=tuple((token, value) for token, value in bias.items() if value),
    )
    path = os.environ.get("MLX_MTP_JSON_SCHEMAS", SCHEMAS)
    found: dict[str, tuple[dict, Request]] = {}
    for case in json.loads(Path(path).read_text("utf-8")):
        spec = GrammarSpec("json_schema", json.dumps(case["schema"]))
        message = {"role": "user", "content": f"Fill in {case['name']}."}
        prompt = tokenizer.encode_chat([message])
        wanted = request(case["name"], prompt, sampling, compiler.compile(spec))
        found[case["name"]] = case["schema"], wanted
    assert len(found) == 200
    return found


def push(text: bytes) -> float:
    if not text.strip():
        return -4.0
    return 8.0 if b'"' in text or text.strip()[-1:] in b"}]" else 0.0


def run(model: LoadedModel, depth: int, wanted: list[Request]) -> Driver:
    config = EngineConfig(num_draft_tokens=depth, max_num_seqs=ROWS)
    driver = Driver(model, vocab_size=4096, stop_ids=model.eos_token_ids, config=config)
    for each in wanted:
        driver.add(each)
    driver.run()
    return driver


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_answers_are_valid_and_the_same_with_mtp_on_and_off(demo_model, tokenizer, cases):
    wanted = [each for _, each in cases.values()]
    off, on = run(demo_model, 0, wanted), run(demo_model, 3, wanted)
    ties, num_valid = Ties(), 0
    for name, (schema, each) in cases.items():
        last = off.outputs[name][-1]
        if isinstance(last.error, GrammarError):
            assert isinstance(on.outputs[name][-1].error, GrammarError)
            continue
        tokens = off.tokens(name)
        if on.tokens(name) != tokens:
            reference = plain(demo_model, each, 4096, demo_model.eos_token_ids)
            ties.check(f"{name} off", tokens, reference)
            ties.check(f"{name} on", on.tokens(name), reference)
        ties.num_tokens += len(tokens)
        if last.finish_reason == "stop":
            answer = json.loads(b"".join(map(tokenizer.token_bytes, tokens[:-1])))
            jsonschema.validate(answer, schema)
            num_valid += 1
        else:
            assert len(tokens) == MAX_TOKENS
    MEASURED.append(f"{num_valid} of {len(cases)} answers ended within {MAX_TOKENS} tokens: valid")
    stats = on.core.stats()
    rate = stats.num_accepted_tokens / stats.num_draft_tokens
    MEASURED.append(f"drafts accepted under JSON schemas, depth 3: {rate:.2f}")
    ties.report("JSON schemas, MTP on and off")
    assert num_valid >= 0.85 * len(cases)
    assert rate > 0.3
