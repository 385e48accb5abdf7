"""The kernels of the gated delta rule: right, and how fast, on this machine.

On a GPU: both kernels against the portable code (in float32 on the CPU) over windows of 1 to 9, 64
and 512 positions after windows of 0 to 8, with ragged lengths; then their speed beside mlx-lm's
loop, mlx-lm's kernel (on Metal) and the portable code, at the shape of Qwen3-Next-80B in bfloat16.
On a CPU: the portable code against mlx-lm's loop over tokens, and how many times faster it is.

    python -m benchmarks.kernels [--full] [--json FILE]

Every kernel variant (types and sizes are template arguments) costs seconds of compilation. So by
default each type, head ratio and Dk is tried with a few of the others; `--full` takes all of their
combinations, which takes many minutes.
"""

import argparse
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx

from benchmarks.kernel_checks import (
    Check,
    check_inputs,
    check_portable,
    check_recurrence,
    checks_table,
    variants,
)
from benchmarks.kernel_timings import time_cpu, time_gpu, timings_table
from mlx_mtp.bench.report import check_writable, write_json
from mlx_mtp.kernels import gpu


def main() -> int:
    """Check, time and print; 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="every combination of template arguments"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args()
    check_writable(given.json)
    began = time.perf_counter()
    on_gpu = gpu.backend() is not None
    checks: list[Check] = []
    if on_gpu:
        for variant in variants(given.full):
            for check in (check_recurrence, check_inputs):
                checks.append(check(variant))
                print(f"{time.perf_counter() - began:4.0f} s  {checks[-1].what}", file=sys.stderr)
    else:
        print("There is no GPU here: the portable code is checked and timed alone.\n")
        checks.extend(check_portable())
    print(checks_table(checks), flush=True)
    timings = list(time_gpu() if on_gpu else time_cpu())
    print(f"\n{timings_table(timings)}\n")
    seconds = time.perf_counter() - began
    device = mx.device_info().get("device_name", platform.machine())
    print(f"{device}, {platform.platform()}, {BACKEND}; {seconds:.0f} s.")
    if given.json:
        content = {
            "device": str(device),
            "backend": str(BACKEND),
            "seconds": seconds,
            "checks": [asdict(check) | {"ok": check.ok} for check in checks],
            "timings": [asdict(timing) for timing in timings],
        }
        write_json(given.json, content)
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
