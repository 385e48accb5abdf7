"""Conversations through a router to several servers: how much of their prompts is cached.

    python -m benchmarks.replicas http://127.0.0.1:3000 http://127.0.0.1:8001 http://127.0.0.1:8002

The first address is asked, the others are the servers behind it (the same one where there is no
router). What fails is counted: servers may be drained or killed meanwhile.
"""

import argparse
import asyncio
import re
import time
from collections import Counter

import httpx

_SYSTEM = "You answer questions about a small town and the people in it. " * 12
_METRIC = r"^mlx_mtp:prefix_cache_{}_total{{.*?}} (\S+)$"


async def _converse(
    client: httpx.AsyncClient, url: str, model: str, number: int, turns: int, told: Counter[str]
) -> None:
    """Ask one question after another; each has all that was said before."""
    messages = [{"role": "system", "content": _SYSTEM}]
    for turn in range(turns):
        text = f"Question {turn} of visitor {number}: what is house {number * 7 + turn} like?"
        messages.append({"role": "user", "content": text})
        body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
        try:
            headers = {"X-Session-Id": str(number)}
            answer = await client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            told[type(error).__name__] += 1
            return
        told[str(answer.status_code)] += 1
        if answer.status_code != 200:
            if told[str(answer.status_code)] == 1:
                print(f"{answer.status_code}: {answer.text:.200}", flush=True)
            return
        content = answer.json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})


async def _counts(client: httpx.AsyncClient, servers: list[str]) -> dict[str, tuple[float, ...]]:
    """Prompt tokens that were looked up and found, of each server that answers."""
    found = {}
    for server in servers:
        try:
            text = (await client.get(f"{server}/metrics")).text
        except httpx.HTTPError:
            continue
        names = ("queries", "hits")
        hits = [re.search(_METRIC.format(name), text, re.MULTILINE) for name in names]
        found[server] = tuple(float(hit[1]) for hit in hits if hit)
    return found


async def _run(options: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=options.at_once + 4)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        servers = options.servers or [options.url]
        # Of a server: a router may not know.
        model = (await client.get(f"{servers[0]}/v1/models")).json()["data"][0]["id"]
        before, told = await _counts(client, servers), Counter[str]()
        room, began = asyncio.Semaphore(options.at_once), time.perf_counter()

        async def one(number: int) -> None:
            async with room:
                await _converse(client, options.url, model, number, options.turns, told)

        await asyncio.gather(*map(one, range(options.conversations)))
        after, rates = await _counts(client, servers), {}
        total = [0.0, 0.0]
        for server, counts in after.items():
            # One that was started again counts anew.
            old = before[server] if counts[0] >= before[server][0] else (0.0, 0.0)
            both = [new - was for new, was in zip(counts, old)]
            total = [a + b for a, b in zip(total, both)]
            rates[server] = f"{both[1] / max(both[0], 1):.3f} of {both[0]:,.0f} tokens"
        print(f"answers by status: {dict(told)} in {time.perf_counter() - began:.0f} s")
        print(f"found in the prefix cache: {rates}; together {total[1] / max(total[0], 1):.3f}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url")
    parser.add_argument("servers", nargs="*")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=8)
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
