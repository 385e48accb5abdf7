"""An agent's turns, replayed: seconds to the first token of each, and what was computed again.

What opencode and Claude Code sent (tests/data/clients) is sent to a server of the bundled model: a
question with the client's system prompt and tools, then turns that each append the captured tool
call and a result. The model's own answers are not used, so each turn also computes a call that no
answer had. Texts that the captures shortened are filled up with words to their length.

    python -m benchmarks.agent_day [--turns 6] [--prefix-cache-size 1GB]
"""

import argparse
import json
import platform
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.servers import ours, running
from mlx_mtp import backend
from mlx_mtp.bench.report import render
from mlx_mtp.models.hub import BUNDLED_MODEL

CAPTURES = Path(__file__).parents[1] / "tests" / "data" / "clients"
CLIENTS = ("opencode", "claude")
_CUT = re.compile(r"^(.*) \[\.\.\. (\d+) characters\]$", re.DOTALL)
_RESULT = "sum-42"  # what the captured call printed
_WORDS = ("def", "return", "value", "file", "the", "test", "import", "error", "line", "of", "path")


class Turn(NamedTuple):
    """What came back."""

    seconds: float  # to the first token
    prompt: int  # tokens
    cached: int


def words(characters: int, seed: str) -> str:
    """Some text of that length, the same for the same seed."""
    drawn = random.Random(seed).choices(_WORDS, k=characters // 3 + 1)
    return " ".join(drawn)[: max(characters, 0)]


def filled(value: Any) -> Any:
    """A captured body with all its texts as long as they were."""
    if isinstance(value, dict):
        return {key: filled(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner) for inner in value]
    if isinstance(value, str) and (cut := _CUT.match(value)):
        return cut[1] + words(int(cut[2]) - len(cut[1]), value)
    return value


def bodies(client: str, turns: int, characters: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body of each turn: the question, then results of so many characters."""
    capture = json.loads((CAPTURES / f"{client}.json").read_text())
    sent = capture["requests"][-1]
    body = filled(sent["body"]) | {"model": "m", "stream": True, "max_tokens": 2}
    called = json.dumps(body["messages"][-2:])
    messages = body["messages"][:-2]
    for number in range(turns):
        yield sent["path"], body | {"messages": messages}
        text = re.sub(r"\b(call|toolu)_\w+", rf"\1_{number}", called)
        text = text.replace(_RESULT, words(characters, str(number)))
        messages = [*messages, *json.loads(text)]


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Turn:
    """One turn, of either API."""
    first, usage = None, dict[str, Any]()
    began = time.perf_counter()
    with client.stream("POST", path, json=body) as response:
        if response.is_error:
            raise RuntimeError(response.read().decode())
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
            choices = [choice["delta"] for choice in event.get("choices", ())]
            pieces = [event["delta"]] if event.get("type") == "content_block_delta" else choices
            if first is None and any(set(p) - {"role", "type"} and any(p.values()) for p in pieces):
                first = time.perf_counter() - began
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    cached += usage.get("cache_read_input_tokens", 0)
    prompt = usage.get("prompt_tokens") or usage["input_tokens"] + cached
    return Turn(first or time.perf_counter() - began, prompt, cached)


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--result", type=int, default=2000, help="characters of a tool's result")
    parser.add_argument("--prefix-cache-size", default="1GB", help="0: everything is computed")
    options = parser.parse_args()
    rows = []
    for name in CLIENTS:
        server = ours(name, BUNDLED_MODEL, "--prefix-cache-size", options.prefix_cache_size)
        with (
            running(server) as url,
            httpx.Client(base_url=url.removesuffix("/v1"), timeout=1200) as client,
        ):
            for number, sent in enumerate(bodies(name, options.turns, options.result), 1):
                turn = ask(client, *sent)
                computed = turn.prompt - turn.cached
                figures = f"{turn.prompt:,}", f"{computed:,}", f"{turn.seconds:.2f}"
                rows.append([name, str(number), *figures])
    print(render(["client", "turn", "prompt", "computed", "seconds"], rows))
    print(f"{platform.platform()}, {backend.prepare()}")


if __name__ == "__main__":
    main()
