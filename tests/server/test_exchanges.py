"""Recorded exchanges: what requests of all APIs ask of the engine, and the answers, by field.

`tests/data/exchanges.json` has groups of requests to a model that gives the same answer to all. An
exchange has the parts to compare: `asked`, the engine's request; `whole`, the answer; `stream`, the
events of the streamed answer. Ids are numbered, times and rates are masked.
`MLX_MTP_WRITE_EXCHANGES=1` records the server's current results: review the difference.
"""

import asyncio
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_mtp.config import ServerConfig
from mlx_mtp.engine.request import Request, TokenLogprobs
from mlx_mtp.errors import StepError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.app import create_app
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL
from tests.support.fake_engine import FakeEngine, Output, answer, out

FILE = Path(__file__).parents[1] / "data" / "exchanges.json"
GROUPS = json.loads(FILE.read_text("utf-8"))
HI = {"messages": [{"role": "user", "content": "hi"}]}
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", HI),
    "text": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {**HI, "max_tokens": 99}),
    "count": ("/v1/messages/count_tokens", HI),
    "tokenize": ("/tokenize", {}),
    "detokenize": ("/detokenize", {}),
}
IMPOSSIBLE = TokenLogprobs(float("-inf"), ((5, float("-inf")),))
SCRIPTS: dict[str, tuple[Output, ...]] = {
    "(fails)": (out(finish="error", error=StepError("it broke")),),
    "(fails later)": (out(40), out(finish="error", error=StepError("it broke"))),
    "(impossible)": (out(40, logprobs=(IMPOSSIBLE,), finish="length"),),
    "(cached)": (
        out(40, num_reused_tokens=5, num_draft_tokens=2, draft_source="mtp"),
        out(40, 41, finish="length"),
    ),
}
ID = re.compile(r"\b(chatcmpl|cmpl|call|msg|resp|rs|fc|toolu)([-_])[0-9a-f]{24,32}\b")
MASKED = {"created", "created_at", "completed_at", "system_fingerprint"}


def masked(value: Any) -> Any:
    """Returns JSON with values masked that differ between runs; a null stays null."""
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "*"
        if inner is not None and (key in MASKED or key.endswith(("_ms", "_per_second")))
        else masked(inner)
        for key, inner in value.items()
    }


def read(response: httpx.Response) -> Any:
    names: dict[str, str] = {}
    text = ID.sub(lambda m: names.setdefault(m[0], f"{m[1]}{m[2]}{len(names)}"), response.text)
    if response.headers["content-type"] == "application/json":
        status = {} if response.status_code == 200 else {"status": response.status_code}
        return {**status, **masked(json.loads(text))}
    found: list[Any] = []
    shared: dict[str, Any] = {}
    so_far = 0
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        event = masked(json.loads(lines["data"])) if lines["data"] != "[DONE]" else {}
        assert lines.get("event", event.get("type")) == event.get("type")
        if "choices" in event:
            # All chunks begin with the same fields, which are recorded only in the first one.
            head = {key: event.pop(key) for key in [*event][: [*event].index("choices")]}
            assert shared in ({}, head)
            event, shared = (event if shared else {**head, **event}), head
        if "message" in event:
            event["message"]["usage"] = "*"  # usage when the event was made
        choices = event.get("choices")
        if choices and event.get("usage") and choices[0]["finish_reason"] is None:
            # The usage so far; only the last chunk's count is certain.
            usage, count = event["usage"], event["usage"]["completion_tokens"]
            assert so_far <= count == usage["total_tokens"] - usage["prompt_tokens"]
            so_far = count
            usage |= {"completion_tokens": "*", "total_tokens": "*"}
        found.append(event or "[DONE]")
    return found


def asked(engine: FakeEngine, tokenizer: Tokenizer) -> Any:
    """Returns the prompts, and all parameters that differ from the neutral values."""
    neutral = dataclasses.asdict(SamplingParams(max_tokens=1))
    found = []
    for request in engine.submitted:
        assert (request.grammar is None) == (request.sampling.grammar is None)
        fields = {"prompt": tokenizer.text_of(request.prompt_token_ids)}
        sampling = json.loads(json.dumps(dataclasses.asdict(request.sampling)))
        if (sampling["grammar"] or {}).get("kind") == "lark":
            sampling["grammar"]["value"] = "*"  # other tests check its text
        fields |= {key: value for key, value in sampling.items() if value != neutral[key]}
        fields |= {
            "num_draft_tokens": request.options.num_draft_tokens,
            "salt": request.options.cache_salt,
        }
        found.append({key: value for key, value in fields.items() if value not in (None, "", [])})
    return found


async def exchanged(group: dict[str, Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Returns the exchanges of a group as the server answers them now."""

    def script(request: Request) -> Iterator[Output]:
        if group["said"] in SCRIPTS:
            return iter(SCRIPTS[group["said"]])
        return answer(tokenizer.encode(group["said"]))(request)

    engine, found = FakeEngine(script), []
    config = ServerConfig(MODEL, seed=1, max_stored_completions=0, unknown_parameters="error")
    app = create_app(engine, tokenizer, config, {"temperature": 0.6, "top_k": 20})
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        for exchange in group["exchanges"]:
            path, smallest = APIS[exchange["api"]]
            body = {"model": MODEL, **smallest, **exchange["fields"]}
            now = {"api": exchange["api"], "fields": exchange["fields"]}
            if "stream" in exchange:
                now["stream"] = read(await client.post(path, json={**body, "stream": True}))
            engine.submitted.clear()
            whole = read(await client.post(path, json=body))
            now["asked"], now["whole"] = asked(engine, tokenizer), whole
            found.append({key: now[key] for key in exchange})
    return found


@pytest.mark.parametrize("number", range(len(GROUPS)), ids=lambda n: GROUPS[n]["said"][:20])
def test_exchanges(tokenizer: Tokenizer, number: int) -> None:
    group = GROUPS[number]
    found = asyncio.run(exchanged(group, tokenizer))
    if os.environ.get("MLX_MTP_WRITE_EXCHANGES"):
        group["exchanges"] = found
        FILE.write_text(dumped(GROUPS, 5) + "\n", "utf-8")
    assert found == group["exchanges"]


def dumped(value: Any, levels: int) -> str:
    """Returns JSON with a line for each item of the outer `levels`."""
    if not levels or not value or not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[\n" + ",\n".join(dumped(inner, levels - 1) for inner in value) + "\n]"
    items = (f"{json.dumps(key)}: {dumped(inner, levels - 1)}" for key, inner in value.items())
    return "{\n" + ",\n".join(items) + "\n}"
