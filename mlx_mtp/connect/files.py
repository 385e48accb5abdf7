"""Changes configuration files; other settings, and comments in TOML and YAML, stay."""

import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomlkit
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from tomlkit.exceptions import TOMLKitError

from mlx_mtp.errors import UsageError

Config = dict[str, Any]
_YAML = YAML()
_YAML.indent(mapping=2, sequence=4, offset=2)
_YAML.width = 1000


def _dump_yaml(value: Any) -> str:
    text = io.StringIO()
    _YAML.dump(value, text)
    return text.getvalue()


# Functions that load and dump a file, and the text of an empty file, by suffix.
_FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str], str]] = {
    ".json": (json.loads, lambda value: json.dumps(value, indent=2) + "\n", "{}"),
    ".toml": (tomlkit.parse, tomlkit.dumps, ""),
    ".yaml": (_YAML.load, _dump_yaml, "{}"),
    ".yml": (_YAML.load, _dump_yaml, "{}"),
}


def config_text(path: Path, config: Config) -> str:
    """Returns the text of a configuration in the format of `path`."""
    return _FORMATS[path.suffix][1](config)


def merged_text(path: Path, config: Config, needed: Mapping[str, Any]) -> str:
    """Returns the text of a file with a configuration merged in; UsageError if it can't be read.

    List entries with the same name are replaced. Keys of `needed` are added if the file lacks them.
    """
    load, dump, empty = _FORMATS[path.suffix]
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        there = load(text if text.strip() else empty)
    except (OSError, ValueError, TOMLKitError, YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{path} can't be read, and is left as it is: {reason}. Put the lines in by hand."
        ) from None
    if not isinstance(there, dict):
        raise UsageError(f"{path} holds no settings, and is left as it is.")
    for key, value in needed.items():
        there.setdefault(key, value)
    _merge(there, config)
    return dump(there)


def _merge(there: Any, config: Config) -> None:
    for key, value in config.items():
        old = there.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            _merge(old, value)
        elif isinstance(old, list) and _has_names(value):
            names = [each.get("name") if isinstance(each, dict) else None for each in old]
            for entry in value:
                if entry["name"] in names:
                    old[names.index(entry["name"])] = entry
                else:
                    old.append(entry)
        else:
            there[key] = value


def _has_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(e, dict) and "name" in e for e in value)


def replace_file(path: Path, text: str) -> Path | None:
    """Replace a file atomically; returns the path of its backup, if any, or raises UsageError."""
    # Replace a link's target, not the link: many users keep configuration files elsewhere.
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        backup, (descriptor, new) = None, tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            names = (path.with_name(f"{path.name}.bak{n or ''}") for n in itertools.count())
            backup = next(name for name in names if not name.exists())
            shutil.copy2(path, backup)
            shutil.copymode(path, new)
        os.replace(new, path)
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}.") from None
    return backup
