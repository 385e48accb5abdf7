"""How a tokenizer's files are read, and which of them is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

# If trust_remote_code is left open, transformers asks on the terminal whether to run a model's own
# code; if it is False, it uses its own class or refuses.
SAFELY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def damaged_file(path: Path) -> Path | None:
    """The file that a directory's tokenizer can't be loaded for, if one stands out."""
    from tokenizers import Tokenizer as Backend

    readers: dict[str, Callable[[str], Any]] = {
        "tokenizer.json": lambda name: Backend.from_file(name),
        "tokenizer_config.json": lambda name: json.loads(Path(name).read_text("utf-8")).items(),
        "config.json": _check_config,
    }
    for name, read in readers.items():
        if not (path / name).exists():
            continue
        try:
            read(str(path / name))
        except Exception:
            return path / name
    return None


def _check_config(name: str) -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained(str(Path(name).parent), **SAFELY)
