"""What it costs that somebody watches /live: 16 streams with 0, 1 and 10 readers of it, in turns.

Each round is compared with those without readers before and after it.

    python -m benchmarks.watching [--rounds 12] [--tokens 200]
"""

import argparse
import asyncio
import statistics
import time

import httpx

from benchmarks.servers import ours, running
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.server.live import SECONDS

STORY = "Write a short story about a fox named Anna who finds a lamp in the forest."
WATCHERS = (0, 1, 10)
STREAMS = 16


async def tokens_per_second(client: httpx.AsyncClient, tokens: int, watchers: int) -> float:
    """The rate of all streams together while so many read /live."""

    async def watch() -> None:
        async with client.stream("GET", "/live") as response:
            async for _ in response.aiter_raw():
                pass

    async def answer(number: int) -> None:
        message = {"role": "user", "content": STORY}
        body = {"model": "m", "messages": [message], "stream": True, "seed": number}
        body |= {"max_tokens": tokens, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_raw():
                pass

    reading = [asyncio.create_task(watch()) for _ in range(watchers)]
    await asyncio.sleep(SECONDS if watchers else 0)
    began = time.perf_counter()
    await asyncio.gather(*map(answer, range(STREAMS)))
    seconds = time.perf_counter() - began
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    return STREAMS * tokens / seconds


async def measure(url: str, rounds: int, tokens: int) -> None:
    """Print the median ratio to the rounds without watchers before and after."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        await tokens_per_second(client, tokens, 0)
        ratios: dict[int, list[float]] = {count: [] for count in WATCHERS[1:]}
        plain = await tokens_per_second(client, tokens, 0)
        for _ in range(rounds):
            for count, found in ratios.items():
                rate = await tokens_per_second(client, tokens, count)
                after = await tokens_per_second(client, tokens, 0)
                found.append(2 * rate / (plain + after))
                plain = after
    for count, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{count} watch: {middle:.3f} of the rate (quartiles {low:.3f} to {high:.3f})")


def main() -> None:
    """Start a server on the bundled model, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    with running(ours("ours", BUNDLED_MODEL, "--mtp-num-draft-tokens", "2")) as url:
        asyncio.run(measure(url.removesuffix("/v1"), options.rounds, options.tokens))


if __name__ == "__main__":
    main()
