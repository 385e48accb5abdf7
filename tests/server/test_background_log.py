"""Log lines written in the background: in order, bounded, without waiting for a reader."""

import logging
import threading

from mlx_mtp.logs import BackgroundLog, Later

PATIENCE = 30.0
logger = logging.getLogger("tests.background_log")


class Kept(logging.Handler):
    """Keeps messages; can be blocked."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.writing, self.go_on = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.writing.set()
        assert self.go_on.wait(PATIENCE)
        self.messages.append(record.getMessage())


def test_nothing_waits_for_a_reader_that_stopped_and_lines_stay_in_order() -> None:
    kept = Kept()
    logger.handlers, logger.level = [kept], logging.INFO
    try:
        log = BackgroundLog(capacity=3, texts=1)
        with log.attached(logger):
            assert logger.handlers != [kept]
            logger.info("line %d", 0)
            assert kept.writing.wait(PATIENCE)
            for text in ("one", "two"):
                logger.info("%(text)s", {"text": Later(text.upper)})
            for number in range(1, 10):
                logger.info("line %d", number)
        assert logger.handlers == [kept]
        assert not log.close(0.01)
        kept.go_on.set()
        assert log.close(PATIENCE)
        # One line is being written and three can wait, only one of them with a deferred text.
        assert kept.messages == ["line 0", "ONE", "line 1", "line 2"]
    finally:
        logger.handlers = []
