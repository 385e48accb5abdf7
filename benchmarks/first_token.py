"""Time to the first token over HTTP while step costs are measured, over that time afterwards.

A server of the bundled model starts with an empty folder for step costs and is asked now and then.
It measures in between, until the folder has the costs; requests go on after that.

    python -m benchmarks.first_token [--requests 20] [--pause 0.4] [--seconds 12]
"""

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.servers import ours, running
from mlx_mtp.bench.client import HttpServer
from mlx_mtp.bench.measure import Asking, median
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.models.hub import BUNDLED_MODEL


def main() -> None:
    """Measure and print three lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20, help="after the costs are measured")
    parser.add_argument("--pause", type=float, default=0.4, help="seconds between two requests")
    parser.add_argument("--seconds", type=float, default=12.0, help="of measuring, at most")
    given = parser.parse_args()
    source = PromptSource(0)
    during: list[float] = []
    after: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "costs"
        flags = ("--cache-dir", str(folder), "--calibration-seconds", str(given.seconds))
        with (
            running(ours("ours", BUNDLED_MODEL, *flags)) as url,
            HttpServer(url, Asking(max_tokens=8), model="m") as server,
        ):
            while len(after) < given.requests:
                times = after if list(folder.rglob("step-costs-*.json")) else during
                (answer,) = server.ask(source.next("short", 1))
                assert answer.ttft is not None
                times.append(answer.ttft)
                time.sleep(given.pause)
    print(f"the first of all: {1e3 * during[0]:.0f} ms")
    for told, times in (("while costs are measured", during[1:]), ("afterwards", after)):
        print(f"{told}: median {1e3 * (median(times) or 0):.1f} ms of {len(times)} requests")
    print(f"while measured over afterwards: {(median(during[1:]) or 0) / (median(after) or 1):.3f}")


if __name__ == "__main__":
    main()
