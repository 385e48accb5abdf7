"""Tokens per second of this server, MTP off and on, beside mlx_lm.server, over HTTP.

All serve the bundled model in float32 and answer the same greedy story prompts. The contenders take
turns, round after round, so that a machine that slows down slows them all.

    python -m benchmarks.concurrency [--rounds 3] [--max-tokens 128] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from mlx_mtp import backend

BACKEND = backend.prepare()

import httpx  # noqa: E402
import mlx.core as mx  # noqa: E402

from benchmarks.servers import Contender, mlx_lm, ours, running  # noqa: E402
from mlx_mtp.models.hub import BUNDLED_MODEL  # noqa: E402

CONCURRENCY = (1, 4, 16)
HEROES = ("Anna the fox", "Ben the owl", "Clara the bear", "Leo the otter")
THINGS = (
    "a lamp in the forest",
    "a map in the village",
    "a bell in the castle",
    "a key by the lake",
)
PROMPTS = [
    f"Write a short story about {hero.split()[0]}, a {hero.split()[-1]} who finds {thing}."
    for hero in HEROES
    for thing in THINGS
]

Rates = dict[str, dict[int, list[float]]]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write every rate here")
    given = parser.parse_args()
    rates: Rates = defaultdict(lambda: defaultdict(list))
    accepted: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        contenders = _contenders(Path(folder))
        for _ in range(given.rounds):
            for contender in contenders:
                with running(contender) as url:
                    accepted[contender.name] = _measure(
                        contender, url, given.max_tokens, rates[contender.name]
                    )
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(rates, accepted))
    print(f"\n{platform.platform()}, {BACKEND}; tokens per second, median of ", end="")
    print(f"{given.rounds} rounds; in brackets the ratio to MTP off in the same run.")
    if given.json:
        given.json.write_text(json.dumps(rates, indent=1))


def table(rates: Rates, accepted: dict[str, str]) -> str:
    """Markdown: a row per contender, a column per concurrency."""
    plain = {n: statistics.median(r) for n, r in rates["MTP off"].items()}
    lines = ["| server | " + " | ".join(f"{n} at once" for n in CONCURRENCY) + " | accepted |"]
    lines.append("|---" * (len(CONCURRENCY) + 2) + "|")
    for name, by_concurrency in rates.items():
        cells = []
        for n in CONCURRENCY:
            median = statistics.median(by_concurrency[n])
            cells.append(f"{median:.0f} ({median / plain[n]:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {accepted[name]} |")
    return "\n".join(lines)


def _contenders(folder: Path) -> list[Contender]:
    depths = [
        ours(f"MTP k = {k}", BUNDLED_MODEL, "--enable-mtp", "--mtp-num-draft-tokens", str(k))
        for k in (1, 2, 3)
    ]
    return [mlx_lm(_in_float32(folder / "float32")), ours("MTP off", BUNDLED_MODEL), *depths]


def _in_float32(target: Path) -> Path:
    """mlx_lm.server has no --dtype, and mlx has no MoE but in float32 on the CPU."""
    shutil.copytree(BUNDLED_MODEL, target, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    for file in BUNDLED_MODEL.glob("model*.safetensors"):
        tensors = mx.load(str(file))
        assert isinstance(tensors, dict)
        wide = {name: value.astype(mx.float32) for name, value in tensors.items()}
        mx.save_safetensors(str(target / file.name), wide, metadata={"format": "pt"})
    return target


def _measure(contender: Contender, url: str, max_tokens: int, rates: dict[int, list[float]]) -> str:
    async def run() -> str:
        timeout = httpx.Timeout(600)
        async with httpx.AsyncClient(base_url=url, timeout=timeout) as client:
            drafted = taken = 0

            async def ask(prompt: str) -> int:
                nonlocal drafted, taken
                body = {
                    "model": contender.model,
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": max_tokens,
                    "temperature": 0,
                }
                answer = (await _post(client, body)).json()
                timings = answer.get("timings", {})
                drafted += timings.get("draft_n", 0)
                taken += timings.get("draft_n_accepted", 0)
                return int(answer["usage"]["completion_tokens"])

            for count in CONCURRENCY:
                await asyncio.gather(*map(ask, PROMPTS[:count]))  # warm up at this size
                began = time.perf_counter()
                tokens = sum(await asyncio.gather(*map(ask, PROMPTS[:count])))
                rates[count].append(tokens / (time.perf_counter() - began))
            return f"{taken / drafted:.1%}" if drafted else "-"

    return asyncio.run(run())


async def _post(client: httpx.AsyncClient, body: dict[str, object]) -> httpx.Response:
    """A server whose listen queue is short (Python's default is 5) resets some of 16 at once."""
    for _ in range(20):
        try:
            return await client.post("/chat/completions", json=body)
        except httpx.TransportError:
            await asyncio.sleep(0.02)
    raise RuntimeError("the server keeps resetting connections")


if __name__ == "__main__":
    main()
