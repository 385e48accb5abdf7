"""Short streams beside a long one over HTTP, against what their costs apart would allow.

Each round measures the short streams alone, the long one alone, and both together. Ideal is a step
of the short rows and one of the long row, one after the other.

    python -m benchmarks.beside [--drafts 0,2] [--short 6] [--long 24000] [--rounds 3]
"""

import argparse
import asyncio
import json
import statistics
import time

import httpx

from benchmarks.servers import ours, running
from benchmarks.shapes import integers
from mlx_mtp.bench.report import render
from mlx_mtp.models.hub import BUNDLED_MODEL

_PROMPT = 500  # tokens of a short stream's prompt


async def rates(client: httpx.AsyncClient, lengths: list[int], seconds: float) -> list[float]:
    """Tokens per second of each stream, counted once all of them have begun."""
    counts, begun = [0] * len(lengths), asyncio.Event()

    async def answer(number: int, length: int) -> None:
        prompt = [(7919 * i + number) % 4000 + 10 for i in range(length)]
        body = {"model": "m", "prompt": prompt, "stream": True, "ignore_eos": True}
        body |= {"max_tokens": 20_000, "temperature": 0}
        body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    usage = json.loads(line[6:]).get("usage") or {}
                    counts[number] = usage.get("completion_tokens", counts[number])
                    if all(counts):
                        begun.set()

    # The long one first: its prompt takes long, and the others shouldn't grow meanwhile.
    tasks = []
    for number, length in sorted(enumerate(lengths), key=lambda each: -each[1]):
        tasks.append(asyncio.create_task(answer(number, length)))
        while length > 10 * _PROMPT and not counts[number]:
            await asyncio.sleep(0.01)
            if tasks[-1].done():
                tasks[-1].result()
    await begun.wait()
    before, began = list(counts), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    found = [(now - then) / took for now, then in zip(counts, before)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def measure(url: str, short: int, long: int, rounds: int, seconds: float) -> list[float]:
    """Medians: a short stream alone, the long one alone, a short one with it, and of ideal."""
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        for round_number in range(rounds + 1):
            few = statistics.mean(await rates(client, [_PROMPT] * short, seconds))
            (one,) = await rates(client, [long], seconds)
            *both, _ = await rates(client, [*[_PROMPT] * short, long], seconds)
            together = statistics.mean(both)
            if round_number:  # In the first the long prompt is not in the prefix cache.
                found.append((few, one, together, together * (1 / few + 1 / one)))
    return [statistics.median(column) for column in zip(*found)]


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--drafts", type=integers, default=[0, 2])
    parser.add_argument("--short", type=int, default=6, help="streams")
    parser.add_argument("--long", type=int, default=24_000, help="tokens of the long one's prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    rows = []
    for drafts in options.drafts:
        flags = ["--calibration-seconds", "0", "--mtp-num-draft-tokens", str(drafts)]
        with running(ours("", BUNDLED_MODEL, *(flags if drafts else ["--no-enable-mtp"]))) as url:
            url = url.removesuffix("/v1")
            counts = options.short, options.long, options.rounds, options.seconds
            *three, share = asyncio.run(measure(url, *counts))
        rows.append([str(drafts), *(f"{rate:.1f}" for rate in three), f"{share:.2f}"])
    heads = ["drafts", "short alone", "long alone", "short, both", "of ideal"]
    print(render(heads, rows))


if __name__ == "__main__":
    main()
