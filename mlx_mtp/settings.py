"""The settings file, and each flag's value: typed, from a variable or the file, or the default."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs.unix import Unix

from mlx_mtp.errors import UsageError
from mlx_mtp.flags import Flag, add_flags, hint, secret
from mlx_mtp.options import BUNDLED_NAME, COMMAND_FLAGS

VARIABLE = "MLX_MTP_CONFIG"
USER_FILE = Unix("mlx-mtp").user_config_path / "config.toml"  # in ~/.config on a Mac, too
_Scope = tuple[str | None, str | None]  # a model and a command; None: any
_WHICH = ("model", "models", "all")  # flags that choose models; a model's table can't have them
_COMMANDS = tuple(COMMAND_FLAGS)
_OF_MODEL = tuple(
    name for name, flags in COMMAND_FLAGS.items() if any(flag.key == "model" for flag in flags)
)


@dataclass(frozen=True)
class SettingsFile:
    """A checked settings file; if `path` is None, there are no settings."""

    path: Path | None
    # By scope: the table's heading in the file, and its values as parsed from TOML.
    tables: Mapping[_Scope, tuple[str, dict[str, object]]]

    def find(self, flag: Flag, command: str | None, model: str | None) -> tuple[Any, str] | None:
        """Returns the flag's value and its place, from the most specific table that has the flag.

        Returns None if no table has it.
        """
        name = None if model is None else _as_key(model)
        for scope in ((name, command), (name, None), (None, command), (None, None)):
            heading, table = self.tables.get(scope, ("", {}))
            if flag.toml_key in table:
                value = flag.from_toml(table[flag.toml_key])
                return value, f"{self.path} {heading}".rstrip()
        return None


def settings_path(environ: Mapping[str, str]) -> Path | None:
    """Returns the file that MLX_MTP_CONFIG names, or the user's; None if the variable is empty."""
    name = environ.get(VARIABLE)
    return USER_FILE if name is None else Path(name).expanduser() if name else None


def read_settings(environ: Mapping[str, str]) -> SettingsFile:
    """Read and check the settings file; raises UsageError if a part of it is wrong."""
    path = settings_path(environ)
    if path is None:
        return SettingsFile(None, {})
    try:
        content, mode = tomllib.loads(path.read_text("utf-8")), path.stat().st_mode
    except OSError as error:
        if isinstance(error, FileNotFoundError) and VARIABLE not in environ:
            return SettingsFile(None, {})
        raise UsageError(f"{path} can't be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from None
    tables = {scope: (heading, table) for scope, heading, table in _tables(path, content)}
    for (_, command), (_, table) in tables.items():
        secrets = {f.toml_key for f in _flags_of(command) if f.parse is secret}
        if mode & 0o077 and not secrets.isdisjoint(table):
            raise UsageError(
                f"{path} has an API key, and other users may read it: chmod 600 it, or name a "
                "file of keys with api-key-file."
            )
    return SettingsFile(path, tables)


def add_settings(parser: argparse.ArgumentParser, *flags: Flag) -> None:
    """Add flags, grouped by heading and without defaults; `resolve` completes them."""
    add_flags(parser, *flags, grouped=True)


def resolve(
    given: argparse.Namespace, flags: Sequence[Flag], environ: Mapping[str, str]
) -> argparse.Namespace:
    """Complete a command line from environment variables, the settings file and defaults.

    The result's `given` maps the keys of all flags whose values aren't defaults to the sources of
    the values; the source of a typed value is empty. `given.command` chooses the file's tables.
    Raises UsageError if a value is wrong.
    """
    file, command = read_settings(environ), getattr(given, "command", None)

    def found(flag: Flag, model: str | None = None) -> tuple[Any, str] | None:
        if flag.key in given:
            value = getattr(given, flag.key)
            return tuple(value) if flag.repeated else value, ""
        if (text := environ.get(flag.variable)) is not None:
            return flag.from_text(text), flag.variable
        return file.find(flag, command, model)

    model = None
    for flag in flags:
        if flag.key == "model":
            model, _ = found(flag) or (BUNDLED_NAME, "")
    values = {flag.key: value for flag in flags if (value := found(flag, model)) is not None}
    defaults = {flag.key: flag.default for flag in flags}
    resolved = {key: value for key, (value, _) in values.items()}
    sources = {key: source for key, (_, source) in values.items()}
    return argparse.Namespace(**(defaults | vars(given) | resolved), given=sources)


def _tables(path: Path, content: dict[str, Any]) -> Iterator[tuple[_Scope, str, dict[str, object]]]:
    """Yields each table's scope, heading and settings; UsageError for a wrong key or value."""

    def part(words: Sequence[str], *scope: str | None, inner: Sequence[str] = ()) -> Any:
        table: Any = content
        for word in words:
            table = table.get(word, {}) if isinstance(table, dict) else None
        heading = f"[{'.'.join(map(_toml_word, words))}]" if words else ""
        where = f"{path}: {heading}".rstrip()
        if not isinstance(table, dict):
            raise UsageError(f"{where} must be a table of settings.")
        settings = {key: value for key, value in table.items() if key not in inner}
        known: dict[str, list[Flag]] = {}
        for flag in _flags_of(scope[1], _OF_MODEL if scope[0] else _COMMANDS):
            if not (scope[0] and flag.key in _WHICH):
                known.setdefault(flag.toml_key, []).append(flag)
        for key, value in settings.items():
            if key not in known:
                having = [c for c in _COMMANDS if any(f.toml_key == key for f in _flags_of(c))]
                help = f"; {' and '.join(having)} can have it" if having else ""
                help = help or hint(key, (*known, *inner))
                end = "" if help.endswith("?") else "."
                raise UsageError(f"{where} can't have a setting {key!r}{help}{end}")
            for flag in known[key]:
                try:
                    flag.from_toml(value)
                except argparse.ArgumentTypeError as error:
                    raise UsageError(f"{where} {key} is wrong: {error}.") from None
        return scope, heading, settings

    yield part((), None, None, inner=(*_COMMANDS, "models"))
    for command in _COMMANDS:
        yield part((command,), None, command)
    models = content.get("models", {})
    if not isinstance(models, dict):
        raise UsageError(f'{path}: models must be tables, such as [models."org/name"].')
    for name in models:
        yield part(("models", name), _as_key(name), None, inner=_OF_MODEL)
        for command in _OF_MODEL:
            yield part(("models", name, command), _as_key(name), command)


def _flags_of(command: str | None, commands: Iterable[str] = _COMMANDS) -> list[Flag]:
    """Returns the flags of a command, or of all `commands`."""
    names = commands if command is None else (command,)
    return [flag for name in names for flag in COMMAND_FLAGS[name]]


def _as_key(model: str) -> str:
    return os.path.normpath(os.path.expanduser(model)).casefold().replace(":", "-")


def _toml_word(word: str) -> str:
    return word if word.isidentifier() else json.dumps(word, ensure_ascii=False)
