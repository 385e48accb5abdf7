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


async def processor_seconds(client: httpx.AsyncClient) -> float:
    """What the server's process has used so far."""
    metrics = (await client.get("/metrics")).text
    return float(metrics.split("\nprocess_cpu_seconds_total ")[1].split()[0])


async def costs(client: httpx.AsyncClient, tokens: int, watchers: int) -> tuple[float, float]:
    """Seconds of all streams together while so many read /live, and of the server's processor."""

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
    used, began = await processor_seconds(client), time.perf_counter()
    await asyncio.gather(*map(answer, range(STREAMS)))
    seconds = time.perf_counter() - began
    used = await processor_seconds(client) - used
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    return seconds, used


async def measure(url: str, rounds: int, tokens: int) -> None:
    """Print the median ratios to the rounds without watchers before and after."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        await costs(client, tokens, 0)
        ratios: dict[int, list[tuple[float, ...]]] = {count: [] for count in WATCHERS[1:]}
        before = await costs(client, tokens, 0)
        for _ in range(rounds):
            for count, found in ratios.items():
                watched = await costs(client, tokens, count)
                after = await costs(client, tokens, 0)
                each = zip(watched, before, after)
                found.append(tuple(2 * now / (last + next_) for now, last, next_ in each))
                before = after
    for count, found in ratios.items():
        for name, values in zip(("time", "processor time"), zip(*found)):
            low, middle, high = statistics.quantiles(values, n=4)
            print(f"{count} watch: {middle:.4f} of the {name} ({low:.4f} to {high:.4f})")


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
