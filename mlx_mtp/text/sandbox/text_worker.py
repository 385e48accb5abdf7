"""A process that renders chats and encodes texts with a model's own template and tokenizer.

Both are programs of the model's author: a template can hold the GIL for minutes in one call, and a
tokenizer can take all memory. A request that takes too much time or memory ends only its process.
"""

import asyncio
import base64
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mlx_mtp import errors
from mlx_mtp.text.sandbox import helper as helpers
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.vision.images import ImageSizes, Pixels, read_image

NUM_WORKERS = 2
MAX_WORKER_BYTES = 4 << 30  # in addition to a process's memory after the tokenizer is loaded
MAX_ENCODE_SECONDS = 60.0
MAX_IMAGE_SECONDS = 20.0
_SPARE_SECONDS = 2.0  # within which a worker at its limit ends itself, unless it is stopped
_WATCH_SECONDS = 0.05
_RETRY_SECONDS = 1.0


class TextWorkers:
    """The processes, with `Tokenizer`'s interface; for up to `NUM_WORKERS` threads at a time."""

    def __init__(self, path: Path, template_seconds: float, template: str | None = None) -> None:
        header = [str(path.absolute()), MAX_WORKER_BYTES, template]
        self._template_seconds = template_seconds
        # Like `Tokenizer.variables`, but a process is asked only about a new template.
        self.variables = lru_cache(maxsize=16)(self._variables_of)
        self._helpers = [helpers.Helper(__name__, header) for _ in range(NUM_WORKERS)]
        self._idle: SimpleQueue[helpers.Helper] = SimpleQueue()
        for helper in self._helpers:
            self._give_back(helper)

    @property
    def fault(self) -> str | None:
        """The reason why no process could be started at the last attempt; None if one could."""
        faults = [helper.fault for helper in self._helpers]
        return faults[0] if all(faults) else None

    def encode(self, text: str, *, param: str | None = None, **options: Any) -> tuple[int, ...]:
        """Like `Tokenizer.encode`; errors of the process name the field `param`."""
        what, seconds = "The model's tokenizer", MAX_ENCODE_SECONDS
        return tuple(self._ask(what, "encode", seconds, param, text, **options))

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Like `Tokenizer.render_chat`."""
        return str(self._ask_template("render_chat", options.get("template"), messages, **options))

    def read_image(self, data: bytes, sizes: ImageSizes) -> Pixels:
        """Like `images.read_image`."""
        given = base64.b64encode(data).decode(), *astuple(sizes)
        seconds = MAX_IMAGE_SECONDS
        answer = self._ask("The decoder of images", "read_image", seconds, "messages", *given)
        height, width, rgb, digest = answer
        return Pixels(height, width, base64.b64decode(rgb), bytes.fromhex(digest))

    def _variables_of(self, template: str | None = None) -> frozenset[str]:
        return frozenset(self._ask_template("variables", template, template))

    def _ask_template(
        self, method: str, template: str | None, /, *args: Any, **options: Any
    ) -> Any:
        """Call a method that reads the model's chat template, or the request's `template`."""
        what, param = "The model's chat template", "messages"
        if template is not None:
            what, param = "The request's chat template", "chat_template"
        return self._ask(what, method, self._template_seconds, param, *args, **options)

    def _ask(
        self, what: str, method: str, seconds: float, param: str | None, *args: Any, **options: Any
    ) -> Any:
        """Call a method of a process's tokenizer; raises its RequestError, or one of our own."""
        helper = self._idle.get()
        try:
            answer = helper.ask([method, seconds, args, options], seconds + _SPARE_SECONDS)
        except helpers.HelperUnavailableError as error:
            message = f"{what} can't be used now: {error}."
            raise errors.UnavailableError(
                message, retry_after=errors.UNKNOWN_RETRY_SECONDS
            ) from None
        except helpers.HelperError as error:
            fault = "took too much memory on this, or broke"
            if error.status == -signal.SIGALRM:
                fault = f"took more than {seconds:g} s on this"
            message = f"{what} {fault}."
            raise errors.InvalidRequestError(message, param=param) from None
        finally:
            self._give_back(helper)
        if "error" in answer:
            kind, message, its_param = answer["error"]
            raise getattr(errors, kind)(message, param=its_param)
        return answer["result"]

    async def keep_running(self) -> None:
        """Until the server ends, retry to start processes that could not be started."""
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            if any(helper.fault for helper in self._helpers):
                await asyncio.to_thread(self._start_again)

    def _start_again(self) -> None:
        for _ in self._helpers:
            helper = self._idle.get()
            with contextlib.suppress(helpers.HelperUnavailableError):
                if helper.fault:
                    helper.make_ready()
            self._idle.put(helper)

    def _give_back(self, helper: helpers.Helper) -> None:
        with contextlib.suppress(helpers.HelperUnavailableError):  # `keep_running` tries again.
            helper.start()
        self._idle.put(helper)

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()


def _answers(header: tuple[str, int, str | None]) -> Callable[[Any], Any]:
    path, most_bytes, template = header
    tokenizer = Tokenizer.load(Path(path), template)
    _bound_memory(most_bytes)
    tokenizer.encode("a")  # Even this can take all memory, if a normalizer multiplies text.

    def answer(question: Sequence[Any]) -> dict[str, Any]:
        method, seconds, args, options = question
        # The timer's signal ends the process, whatever it does.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            run = _read_image if method == "read_image" else getattr(tokenizer, method)
            result = run(*args, **options)
            return {"result": list(result) if isinstance(result, frozenset) else result}
        except errors.MlxMtpError as error:
            return {"error": [type(error).__name__, str(error), error.param]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return answer


def _read_image(data: str, *sizes: int) -> tuple[int, int, str, str]:
    pixels = read_image(base64.b64decode(data), ImageSizes(*sizes))
    rgb = base64.b64encode(pixels.rgb).decode()
    return pixels.height, pixels.width, rgb, pixels.digest.hex()


def _bound_memory(most_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # Other systems ignore this limit.
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
    helpers.answer_questions(_answers)
