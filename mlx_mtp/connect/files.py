"""Configuration files: what is there stays, comments too where the format has them."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from tomlkit.exceptions import TOMLKitError

from mlx_mtp.errors import UsageError


@dataclass(frozen=True, slots=True)
class _Format:
    load: Callable[[str], Any]
    dump: Callable[[Any], str]


def _yaml() -> YAML:
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 1000
    return yaml


def _dump_yaml(value: Any) -> str:
    text = io.StringIO()
    _yaml().dump(value, text)
    return text.getvalue()


_FORMATS = {
    ".json": _Format(json.loads, lambda value: json.dumps(value, indent=2) + "\n"),
    ".toml": _Format(tomlkit.parse, tomlkit.dumps),
    ".yaml": _Format(lambda text: _yaml().load(text), _dump_yaml),
}


def shown(path: Path, config: dict[str, Any]) -> str:
    """A configuration as its file would have it."""
    return _FORMATS[path.suffix].dump(config)


def merged(path: Path, config: dict[str, Any], needed: dict[str, Any]) -> str:
    """The text of a file with a configuration put in.

    Args:
        path: of the file, which may not exist.
        config: goes over what is there; of a list, entries replace those of the same name.
        needed: goes in where the file lacks it.

    Raises:
        UsageError: the file can't be read, or isn't in its format.
    """
    form = _FORMATS[path.suffix]
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        there = form.load(text) if text.strip() else form.load(_EMPTY[path.suffix])
    except (OSError, ValueError, TOMLKitError, YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{path} can't be read, and is left as it is: {reason}. Put the lines in by hand."
        ) from None
    if not isinstance(there, dict):
        raise UsageError(f"{path} holds no settings, and is left as it is.")
    for key, value in needed.items():
        there.setdefault(key, value)
    _put(there, config)
    return form.dump(there)


_EMPTY = {".json": "{}", ".toml": "", ".yaml": "{}"}


def _put(there: Any, config: dict[str, Any]) -> None:
    for key, value in config.items():
        old = there.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            _put(old, value)
        elif isinstance(value, list) and isinstance(old, list) and _have_names(value):
            _put_by_name(old, value)
        else:
            there[key] = value


def _have_names(entries: list[Any]) -> bool:
    return all(isinstance(entry, dict) and "name" in entry for entry in entries)


def _put_by_name(there: list[Any], entries: list[Any]) -> None:
    for entry in entries:
        for number, old in enumerate(there):
            if isinstance(old, dict) and old.get("name") == entry["name"]:
                there[number] = entry
                break
        else:
            there.append(entry)


def write(path: Path, text: str) -> Path | None:
    """Write a file in one go; returns the copy that was made of what was there.

    Raises:
        UsageError: it can't be written; what was there is as it was.
    """
    # A link stays one: many people keep such files elsewhere.
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        backup = None
        if path.exists():
            backup = _free_name(path)
            shutil.copy2(path, backup)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False
        ) as file:
            file.write(text)
        if backup is not None:
            shutil.copymode(backup, file.name)
        os.replace(file.name, path)
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}.") from None
    return backup


def _free_name(path: Path) -> Path:
    number = 0
    while True:
        name = path.with_name(f"{path.name}.bak{number or ''}")
        if not name.exists():
            return name
        number += 1
