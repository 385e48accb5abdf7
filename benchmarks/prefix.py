"""Time to the first token of a conversation's second turn, with and without the prefix cache.

A server of the bundled model is asked over HTTP. Each round has a conversation of its own, of so
many tokens: its first turn, then the second one, which finds the first; and the second one again
with another `cache_salt`, which finds nothing.

    python -m benchmarks.prefix [--tokens 2000] [--rounds 5] [--kv-cache-quantization none]
"""

import argparse
import json
import platform
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.servers import ours, running
from mlx_mtp import backend
from mlx_mtp.bench.report import render
from mlx_mtp.models.hub import BUNDLED_MODEL

_WORDS = ("fox", "lamp", "river", "owl", "map", "stone", "boat", "night", "song", "bread", "snow")
_TOKENS_PER_WORD = 1.46
Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """What came back.

    Args:
        text: of the answer.
        seconds: from the request to the first token.
        prompt, cached: tokens.
    """

    text: str
    seconds: float
    prompt: int
    cached: int


def ask(client: httpx.Client, chat: Chat, salt: str) -> Answer:
    """Stream an answer of a few tokens."""
    body: dict[str, Any] = {"model": "m", "messages": chat, "max_tokens": 8, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt}
    text, first = "", None
    usage: dict[str, Any] = {}
    began = time.perf_counter()
    with client.stream("POST", "/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or choice["delta"].get("reasoning_content")
                if piece and first is None:
                    first = time.perf_counter() - began
                text += piece or ""
            usage = event.get("usage") or usage
    assert first is not None, "the answer had no token"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(text, first, usage["prompt_tokens"], cached)


def conversation(tokens: int, seed: int) -> Chat:
    """A system prompt and a question, about so many tokens."""
    words = random.Random(seed).choices(_WORDS, k=int(tokens / _TOKENS_PER_WORD))
    half = len(words) // 2
    return [
        {"role": "system", "content": "You know these words: " + " ".join(words[:half]) + "."},
        {"role": "user", "content": " ".join(words[half:]) + ". Tell me a story of them."},
    ]


def measure(client: httpx.Client, tokens: int, number: int) -> tuple[Answer, Answer]:
    """One round: the second turn warm, and cold."""
    chat = conversation(tokens, number)
    answer = ask(client, chat, f"{number}")
    chat = [
        *chat,
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "And then?"},
    ]
    return ask(client, chat, f"{number}"), ask(client, chat, f"{number} cold")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2000, help="of the first turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-quantization", default="none", choices=["none", "8", "4"])
    options = parser.parse_args()
    flags = ("--enable-mtp", "--mtp-num-draft-tokens", "1", "--prefix-cache-size", "1GB")
    quantization = ("--kv-cache-quantization", options.kv_cache_quantization)
    with (
        running(ours("prefix", BUNDLED_MODEL, *flags, *quantization)) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        measure(client, options.tokens, 0)  # compiles, and touches memory
        rounds = [measure(client, options.tokens, n + 1) for n in range(options.rounds)]
    rows = []
    for warm, cold in rounds:
        seconds = (f"{cold.seconds:.3f}", f"{warm.seconds:.3f}")
        ratio = f"{warm.seconds / cold.seconds:.1%}"
        rows.append([str(warm.prompt), str(warm.cached), *seconds, ratio])
    print(render(["prompt", "cached", "cold s", "warm s", "ratio"], rows))
    median = statistics.median(warm.seconds / cold.seconds for warm, cold in rounds)
    print(f"median ratio of warm to cold: {median:.1%}; {platform.platform()}, {backend.prepare()}")


if __name__ == "__main__":
    main()
