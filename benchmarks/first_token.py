"""Time to the first token over HTTP while step costs are measured, over that time without.

Servers of the bundled model start one after the other, in turns one with an empty folder for step
costs, which measures them whenever it is idle, and one that measures nothing. Each is asked a few
times; what the former answers after it has measured everything is left out.

    python -m benchmarks.first_token [--starts 5] [--requests 6] [--pause 0.2]
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.servers import ours, running
from mlx_mtp.bench.client import HttpServer
from mlx_mtp.bench.measure import Asking, median
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.models.hub import BUNDLED_MODEL


def first_tokens(seconds: str, given: argparse.Namespace) -> Iterator[float]:
    """Of a new server that may measure for so long: the time of each request."""
    with tempfile.TemporaryDirectory() as name:
        flags = ("--cache-dir", name, "--calibration-seconds", seconds)
        with (
            running(ours("ours", BUNDLED_MODEL, *flags)) as url,
            HttpServer(url, Asking(max_tokens=8), model="m") as server,
        ):
            for prompt in PromptSource(0).next("short", given.requests):
                time.sleep(given.pause)
                if list(Path(name).rglob("step-costs-*.json")):
                    return  # All is measured.
                (answer,) = server.ask([prompt])
                assert answer.ttft is not None
                yield answer.ttft


def main() -> None:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=5, help="of each server")
    parser.add_argument("--requests", type=int, default=6, help="to a server, at most")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds before each request")
    given = parser.parse_args()
    found: dict[tuple[str, bool], list[float]] = {}
    for _ in range(given.starts):
        for seconds in ("30", "0"):
            for number, ttft in enumerate(first_tokens(seconds, given)):
                found.setdefault((seconds, number == 0), []).append(ttft)
    for is_first, told in ((True, "a server's first request"), (False, "later ones")):
        during, without = (found[seconds, is_first] for seconds in ("30", "0"))
        times = [median(each) or 0.0 for each in (during, without)]
        shown = " over ".join(f"{1e3 * each:.0f} ms" for each in times)
        print(f"{told}, {len(during)} while it measures: {shown}, ratio {times[0] / times[1]:.3f}")


if __name__ == "__main__":
    main()
