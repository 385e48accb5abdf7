"""The log: one format for the records of all libraries, and a thread that writes them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from logging.handlers import RotatingFileHandler
from typing import Any

from mlx_mtp.console import hanging, one_line, width_of
from mlx_mtp.errors import UNEXPECTED, UsageError

_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


def set_up(level: str, form: str = "text", file: str | None = None) -> None:
    """Log to standard error, or to `file`: this package from `level` on, others from warnings on.

    `form` is "text" or "json". Raises UsageError if the file can't be opened.
    """
    handler: logging.Handler = LogFile(file) if file else logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonFormatter())
    elif not file and (width := width_of(sys.stderr)) is not None:
        handler = TerminalHandler()
        handler.setFormatter(TextFormatter("%H:%M:%S", width))
    else:
        handler.setFormatter(TextFormatter("%Y-%m-%d %H:%M:%S"))
    # At level info other libraries log every HTTP request that they make.
    logging.basicConfig(handlers=[handler])
    logging.getLogger("mlx_mtp").setLevel(level.upper())
    logging.captureWarnings(True)


class _Record(logging.LogRecord):
    """A record whose message is one line, even if a library's own handler writes it."""

    def getMessage(self) -> str:  # noqa: N802
        return one_line(super().getMessage())


logging.setLogRecordFactory(_Record)


class Later:
    """A text that is computed only when its record is written."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    def __str__(self) -> str:
        return self._make()


class TextFormatter(logging.Formatter):
    """Formats time, level, logger (unless it is this package's), message and traceback, if any.

    A record is one line, with escapes in place of newlines. With `width`, the columns of a
    terminal, records are wrapped, tracebacks keep their lines, all lines but the first are
    indented, and the level is omitted if it is info.
    """

    def __init__(self, time_format: str, width: int | None = None) -> None:
        super().__init__()
        self._time_format, self._width = time_format, width

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime(self._time_format)
        ours = record.name.partition(".")[0] == "mlx_mtp"
        text = record.getMessage() if ours else f"{record.name}: {record.getMessage()}"
        lines = [text]
        if record.exc_info:
            lines += map(one_line, self.formatException(record.exc_info).split("\n"))
        text = ("\n" if self._width else r"\n").join(lines)
        level = "" if self._width and record.levelno == logging.INFO else f"{record.levelname} "
        return hanging(f"{at} {level}", text, self._width)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message and its named values."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.args, dict):
            fields |= record.args
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str).replace("\x7f", r"\u007f")


def log_again(logger: logging.Logger, line: str, model: str) -> str:
    """Log a line that a model's process wrote, with the model's name; return the line's message.

    Lines of `JsonFormatter` keep their level and fields; other lines get the level info.
    """
    fields: dict[str, Any] = {"message": line, "level": "info"}
    with contextlib.suppress(*UNEXPECTED):
        fields |= json.loads(line)
    text = str(fields.pop("message")).strip()
    if exception := fields.get("exception"):
        text += f"\n{exception}"
    level = logging.getLevelNamesMapping().get(str(fields.pop("level")).upper(), logging.INFO)
    values = {"model": model, **fields}
    values.pop("time", None)
    if text:  # logging formats it with the values: escape its percent signs.
        logger.log(level, f"{model}: {text}".replace("%", "%%"), values)
    return text


class TerminalHandler(logging.Handler):
    """Writes to a terminal, in colour if it has colours."""

    def __init__(self) -> None:
        from rich.console import Console

        super().__init__()
        self._console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(self.format(record), style=_STYLES.get(record.levelname))
        except Exception:
            self.handleError(record)


class LogFile(RotatingFileHandler):
    """A log file that is renamed to FILE.1 when it reaches 10 MB; three old files are kept.

    If standard output or error is this file, as under launchd, it is redirected to the new file.
    Raises UsageError if the file can't be opened.
    """

    def __init__(self, path: str, max_bytes: int = 10_000_000) -> None:
        try:
            super().__init__(path, maxBytes=max_bytes, backupCount=3, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--log-file {path} can't be opened: {error.strerror}.") from None
        # Processes that end before they log anything also write their errors to this file.
        if os.path.getsize(path) > max_bytes:
            self.doRollover()

    def doRollover(self) -> None:  # noqa: N802
        log = os.stat(self.baseFilename)
        shared = [number for number in (1, 2) if os.path.samestat(os.fstat(number), log)]
        super().doRollover()
        with open(self.baseFilename, "ab") as new:
            for number in shared:
                os.dup2(new.fileno(), number)


class BackgroundLog:
    """Writes log records on its own thread, as a pipe that nobody reads blocks its writer.

    Records are dropped while `capacity` records wait to be written. Records with a `Later`, which
    can hold a long prompt, are dropped while `texts` records wait.
    """

    def __init__(self, capacity: int = 10_000, texts: int = 256) -> None:
        self._texts = texts
        self._waiting: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._write, name="mlx-mtp-log", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def attached(self, logger: logging.Logger = logging.root) -> Iterator[None]:
        before = logger.handlers
        logger.handlers = [self._queued(each) for each in before]
        try:
            yield
        finally:
            logger.handlers = before

    def close(self, seconds: float = 1.0) -> bool:
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _write(self) -> None:
        while (write := self._waiting.get()) is not None:
            write()

    def _queued(self, handler: logging.Handler) -> logging.Handler:
        def emit(record: logging.LogRecord) -> None:
            values = record.args.values() if isinstance(record.args, Mapping) else ()
            if self._waiting.qsize() >= self._texts and any(isinstance(v, Later) for v in values):
                return
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(partial(handler.handle, record))

        queued = logging.Handler(handler.level)
        queued.emit = emit  # type: ignore[method-assign]
        return queued
