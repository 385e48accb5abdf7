"""A real `mlx-mtp serve --enable-mtp` for a downloaded test, one for each set of flags."""

import atexit
import functools
import os
import re
import signal
import subprocess
import sys

# With a seed, requests that bring none are answered the same in each run. A log of each request
# would fill the pipe, which nobody reads after the first lines.
_COMMON = ("--enable-mtp", "--port", "0", "--dtype", "float32", "--seed", "1")
_QUIET = ("--log-level", "warning")


@functools.cache
def serve(*flags: str) -> str:
    """Start a server, once for these flags; return its address, without a slash at the end."""
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
