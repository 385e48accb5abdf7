"""A real `mlx-mtp serve --enable-mtp` for a downloaded test, one for each set of flags."""

import atexit
import functools
import os
import re
import signal
import subprocess
import sys

# With a server seed, requests without one get the same answers in each run. A log of requests
# would fill the pipe, as nobody reads it after the first lines.
_COMMON = ("--enable-mtp", "--port", "0", "--dtype", "float32", "--seed", "1")
_QUIET = ("--log-level", "warning")


@functools.cache
def serve(*flags: str) -> str:
    """Start one server per set of flags; returns its address, without a trailing slash."""
    command = [sys.executable, "-m", "mlx_mtp", "serve", *_COMMON, *_QUIET, *flags]
    # The suite's own packages must not be found before this project's.
    environment = {**os.environ, "PYTHONPATH": os.environ["SUITE_ROOT"]}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    atexit.register(_stop, process)
    assert process.stdout is not None
    for line in process.stdout:
        address = re.search(r"address\s+(http://\S+)", line)
        if address:
            return address[1]
    raise AssertionError(f"the server ended with status {process.wait()}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
