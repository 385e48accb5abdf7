"""Log lines in the background: in order, bounded, and never waited for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from mlx_mtp.server.background_log import BackgroundLog

PATIENCE = 30.0
NAME = "tests.background_log"
logger = logging.getLogger(NAME)


class Kept(logging.Handler):
    """Keeps messages; may hang."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.writing, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def emit(self, record: logging.LogRecord) -> None:
        self.writing.set()
        assert self.go_on.wait(PATIENCE)
        self.messages.append(record.getMessage())


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    handler.go_on.set()
    logger.removeHandler(handler)


def test_lines_are_written_in_order_and_the_handlers_come_back(kept: Kept) -> None:
    log = BackgroundLog()
    with log.attached([NAME]):
        assert logger.handlers != [kept]
        for number in range(100):
            logger.info("line %d", number)
    assert logger.handlers == [kept]
    assert log.close(PATIENCE)
    assert kept.messages == [f"line {number}" for number in range(100)]


def test_nothing_waits_for_a_reader_that_stopped(kept: Kept) -> None:
    log = BackgroundLog(capacity=3)
    kept.go_on.clear()
    with log.attached([NAME]):
        logger.info("line 0")
        assert kept.writing.wait(PATIENCE)
        for number in range(1, 10):
            logger.info("line %d", number)
    assert not log.close(0.01)
    kept.go_on.set()
    assert log.close(PATIENCE)
    assert kept.messages == [f"line {number}" for number in range(4)]
