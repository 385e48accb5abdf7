"""Measured step costs between runs: one small JSON file per model and machine."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from mlx_mtp.speculative.costs import Seconds

logger = logging.getLogger(__name__)

_FORMAT = 1
_FRESH_SECONDS = 30 * 24 * 3600.0
"""Older tables are measured again: drivers and systems change without a new fingerprint."""


class CostStore:
    """A file in a cache directory. Whatever is wrong with it costs a measurement, never a start.

    Args:
        folder: made when something is saved.
        fingerprint: of all that the costs depend on; another one is another file.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.path = folder / f"step-costs-{fingerprint[:32]}.json"
        self._fingerprint = fingerprint
        self._warned = False

    def load(self) -> Seconds:
        """What an earlier run measured; empty where there is none, or none that can be used."""
        try:
            content = json.loads(self.path.read_bytes())
            return self._checked(content)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            # It will be replaced by what this run measures.
            logger.warning("%s is not used: %s: %s", self.path, type(error).__name__, error)
            return {}

    def save(self, table: Seconds) -> None:
        """Replace the file in one go; a directory that can't be written is only warned of."""
        content = {
            "format": _FORMAT,
            "fingerprint": self._fingerprint,
            "saved_at": time.time(),
            "seconds": table,
        }
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A folder of its own goes away with what is in it, whatever fails.
            with tempfile.TemporaryDirectory(dir=folder, prefix=".step-costs-") as beside:
                file = Path(beside) / self.path.name
                file.write_text(json.dumps(content))
                os.replace(file, self.path)
        except OSError as error:
            if not self._warned:
                logger.warning("Step costs are not kept for the next run: %s", error)
            self._warned = True

    def _checked(self, content: Any) -> Seconds:
        if content["format"] != _FORMAT or content["fingerprint"] != self._fingerprint:
            raise ValueError("it is of another version, model or machine")
        if not 0 <= time.time() - content["saved_at"] < _FRESH_SECONDS:
            raise ValueError("it is too old")
        table = {
            int(size): {int(depth): float(seconds) for depth, seconds in row.items()}
            for size, row in content["seconds"].items()
        }
        for size, row in table.items():
            for depth, seconds in row.items():
                if size < 1 or depth < 0 or not (seconds > 0 and math.isfinite(seconds)):
                    raise ValueError(f"{size} rows at depth {depth} can't take {seconds} seconds")
        return table
