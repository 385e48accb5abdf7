"""A process that renders chats and encodes texts with a model's own template and tokenizer.

They are its author's programs: a template may take Python's lock for minutes in one call, and a
tokenizer all memory. What takes too much of either ends its process, and no other request.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mlx_mtp import errors
from mlx_mtp.text.sandbox.helper import (
    Helper,
    HelperError,
    HelperUnavailableError,
    answer_questions,
)
from mlx_mtp.text.tokenizer import Tokenizer

NUM_WORKERS = 2
MAX_WORKER_BYTES = 4 << 30  # beside what a worker takes when its tokenizer is loaded
MAX_ENCODE_SECONDS = 60.0
_SPARE_SECONDS = 2.0  # By then a worker has ended itself, if it is not stopped.
_WATCH_SECONDS = 0.05
_RETRY_SECONDS = 1.0


class TextWorkers:
    """The processes, from the server's side; as many threads as `NUM_WORKERS` may use them."""

    def __init__(self, path: Path) -> None:
        header = [str(path.absolute()), MAX_WORKER_BYTES]
        self._helpers = [Helper(__name__, header) for _ in range(NUM_WORKERS)]
        self._idle: SimpleQueue[Helper] = SimpleQueue()
        for helper in self._helpers:
            self._give_back(helper)

    @property
    def fault(self) -> str | None:
        """Why no text can be read now: no process could be started at the last attempt."""
        faults = [helper.fault for helper in self._helpers]
        return faults[0] if all(faults) else None

    def call(self, name: str, seconds: float, *args: Any, **more: Any) -> Any:
        """Return what the tokenizer's method returns, or raise its RequestError.

        TimeoutError: it took more than `seconds`. HelperError: it ended its process in another
        way. HelperUnavailableError: no process can be started.
        """
        helper = self._idle.get()
        try:
            answer = helper.ask([name, seconds, args, more], seconds + _SPARE_SECONDS)
        except HelperError as error:
            if error.status == -signal.SIGALRM:
                raise TimeoutError from None
            raise
        finally:
            self._give_back(helper)
        if "error" in answer:
            kind, message, param = answer["error"]
            raise getattr(errors, kind)(message, param=param)
        return answer["found"]

    async def keep_running(self) -> None:
        """Start again what could not be started, until the server ends."""
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            if any(helper.fault for helper in self._helpers):
                await asyncio.to_thread(self._start_again)

    def _start_again(self) -> None:
        for _ in self._helpers:
            helper = self._idle.get()
            with contextlib.suppress(HelperUnavailableError):
                if helper.fault:
                    helper.make_ready()
            self._idle.put(helper)

    def _give_back(self, helper: Helper) -> None:
        with contextlib.suppress(HelperUnavailableError):  # `keep_running` tries again.
            helper.start()
        self._idle.put(helper)

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()


def _answers(header: tuple[str, int]) -> Callable[[Any], Any]:
    path, most_bytes = header
    tokenizer = Tokenizer.load(Path(path))
    _bound_memory(most_bytes)
    tokenizer.encode("a")  # A normalizer that multiplies text may take all memory even here.

    def answer(question: Sequence[Any]) -> dict[str, Any]:
        name, seconds, args, more = question
        # Its signal ends the process, whatever it does.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return {"found": getattr(tokenizer, name)(*args, **more)}
        except errors.MlxMtpError as error:
            return {"error": [type(error).__name__, str(error), error.param]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return answer


def _bound_memory(most_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # Elsewhere the system takes no notice of this limit.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    unit = 1 if sys.platform == "darwin" else 1024

    def used() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    most_used = used() + most_bytes

    def watch() -> None:
        while used() < most_used:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    answer_questions(_answers)
