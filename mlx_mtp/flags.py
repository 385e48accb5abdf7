"""Flags, each with the name of its environment variable and of its key in the settings file."""

import argparse
import difflib
import json
import math
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlx_mtp.console import say_wrapped
from mlx_mtp.errors import UsageError

PREFIX = "MLX_MTP_"
_NUMBER = re.compile(r"[+-]?[0-9]+")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[hms])+|[0-9]+(?:\.[0-9]+)?")
_DURATION_PART = re.compile(r"([0-9.]+)([hms]?)")
_SECONDS_OF = {"h": 3600.0, "m": 60.0, "s": 1.0, "": 1.0}
_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?")
# Desktop applications and browser extensions have schemes of their own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}

Parse = Callable[[str], Any]


def print_error(message: str, command: str = "mlx-mtp") -> None:
    """Print an error as one line on standard error, whatever a library or a file puts in it."""
    say_wrapped(f"{command}: {' '.join(message.split())}", file=sys.stderr)


class CommandParser(argparse.ArgumentParser):
    """argparse with one-line errors, without the usage, which would fill a screen for `serve`."""

    passes_on = False  # True for a command that gets the arguments after `--` in `passed_on`

    def error(self, message: str) -> NoReturn:
        print_error(f"{message} (see {self.prog} --help)", self.prog)
        self.exit(2)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Reject unknown arguments here, so that the error names the subcommand's help."""
        self._given = set[str]()
        passed_on: list[str] = []
        if self.passes_on and args and "--" in args:
            at = args.index("--")
            args, passed_on = args[:at], [*args[at + 1 :]]
        options, rest = super().parse_known_args(args, namespace)
        if self.passes_on:
            options.passed_on = passed_on
        if rest:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            hints = [hint(word.partition("=")[0], known) for word in rest if word[:1] == "-"]
            self.error(f"unrecognized arguments: {' '.join(rest)}{''.join(hints)}")
        return options, rest

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse a repeated flag that isn't a list; argparse would take its last value."""
        if arg_strings or action.option_strings:  # else: an optional argument that is left out
            if action.dest in self._given and not isinstance(action, argparse._AppendAction):
                raise argparse.ArgumentError(action, "it is given twice")
            self._given.add(action.dest)
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = [str(each) for each in action.choices]
            help = hint(str(value), words) or f" (choose from {', '.join(words)})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{help}")


def hint(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error message with the known word closest to a mistyped one, or ""."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, with its help and its environment variable."""

    # An optional heading of the help, the name and a placeholder: "server: --port N". A name
    # without dashes is an optional positional argument, which is also accepted as a flag.
    usage: str
    help: str  # one line, to which the default is appended
    # A function that converts text or raises ArgumentTypeError, the choices, or None for a boolean.
    parse: Parse | tuple[str, ...] | None = None
    default: Any = None
    repeated: bool = False  # the value is a tuple; the variable separates items by commas
    default_text: str | None = None  # a description of a default that isn't constant

    @property
    def group(self) -> str | None:
        return self.usage.rpartition(": ")[0] or None

    @property
    def name(self) -> str:
        return self.usage.rpartition(": ")[2].partition(" ")[0]

    @property
    def metavar(self) -> str | None:
        if isinstance(self.parse, tuple):
            comma = any("," in word for word in self.parse)
            return f"{{{('|' if comma else ',').join(self.parse)}}}"
        return self.usage.rpartition(": ")[2].partition(" ")[2] or None

    @property
    def shown_default(self) -> str:
        if self.default_text is not None or self.default in (None, ()) or self.default is False:
            return self.default_text or ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()

    @property
    def toml_key(self) -> str:
        return self.name.lstrip("-")

    @property
    def convert(self) -> Parse:
        return word_of(*self.parse) if isinstance(self.parse, tuple) else self.parse or boolean

    def from_text(self, text: str) -> Any:
        """Parse the environment variable's text; UsageError if it is wrong."""
        parse = self.convert
        try:
            if self.repeated:
                return tuple(parse(each.strip()) for each in text.split(","))
            return parse(text)
        except ArgumentTypeError as error:
            fault = f"The environment variable {self.variable} is wrong: {error}."
            raise UsageError(fault) from None

    def from_toml(self, value: object) -> Any:
        """Convert a value of the settings file; ArgumentTypeError says what would be right."""
        if self.parse is None:
            if not isinstance(value, bool):
                raise ArgumentTypeError("it must be true or false, without quotes")
            return value
        if not self.repeated:
            return self._from_item(value)
        if not isinstance(value, list):
            raise ArgumentTypeError('it must be a list of texts, such as ["one", "two"]')
        return tuple(map(self._from_item, value))

    def _from_item(self, value: object) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ArgumentTypeError("it must be a text in quotes or a number")
        result = self.convert(str(value))
        # A number's text can differ from what was typed: 3.10 becomes 3.1.
        if isinstance(result, str | Path) and not isinstance(value, str):
            raise ArgumentTypeError("it must be a text, in quotes")
        return result


def add_flags(parser: argparse.ArgumentParser, *flags: Flag, grouped: bool = False) -> None:
    """Add flags to a parser. If `grouped`, they are under headings and have no defaults."""
    groups: dict[str | None, Any] = {None: parser}
    for flag in flags:
        group = flag.group if grouped else None
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        shown = f" (default: {flag.shown_default})" if flag.shown_default else ""
        default = argparse.SUPPRESS if grouped else flag.default
        text = (flag.help + shown).replace("%", "%%")  # argparse formats it
        options: dict[str, Any] = {"help": text, "default": default}
        if flag.parse is None:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": flag.convert, "metavar": flag.metavar}
        if flag.repeated:
            options["action"] = "append"
        if flag.name.startswith("-"):
            groups[group].add_argument(flag.name, **options)
            continue
        if not grouped:
            parser.set_defaults(**{flag.key: flag.default})
        options["default"] = argparse.SUPPRESS
        of_flag = options.pop("action", "store")
        groups[group].add_argument(flag.name, nargs="*" if flag.repeated else "?", **options)
        options |= {"action": of_flag}
        options["help"] = argparse.SUPPRESS
        groups[group].add_argument(f"--{flag.name}", **options)


def arguments_of(options: argparse.Namespace, flags: Iterable[Flag]) -> list[str]:
    """Returns arguments that repeat the values of `flags` given in `options` (`resolve`)."""
    words = []
    for flag in flags:
        if flag.key not in options.given:
            continue
        value, name = getattr(options, flag.key), f"--{flag.name.lstrip('-')}"
        if flag.parse is None:
            words.append(name if value else f"--no-{flag.name.lstrip('-')}")
        else:
            for each in value if flag.repeated else [value]:
                text = json.dumps(each) if isinstance(each, dict) else each
                words.append(f"{name}={'none' if text is None else text}")
    return words


# Parsers of values and functions that make them. Parsers raise ArgumentTypeError with the reason.


def boolean(text: str) -> bool:
    """Parse 1, 0, true or false."""
    return _BOOLEANS[word_of(*_BOOLEANS)(text.lower())]


def integer(low: int, high: int, unit: str = "") -> Parse:
    """Returns a parser of integers from `low` to `high`; error messages add `unit` to numbers."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise ArgumentTypeError(f"{value}{unit} is not between {low} and {high}{unit}")
        return value

    return parse


def word_or(word: str, parse: Parse) -> Parse:
    """Returns a parser that accepts `word` and all that `parse` accepts."""

    def parse_either(text: str) -> Any:
        if text == word:
            return word
        try:
            return parse(text)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{error}, and it is not {word!r}") from None

    return parse_either


def count_or_path(value: str) -> int | Path:
    """Parse a positive number, or else a file's path."""
    if _NUMBER.fullmatch(value):
        return int(integer(1, 1 << 31)(value))
    return Path(nonempty_text(value))


def byte_size(text: str) -> int:
    """Parse a size into bytes: 8GB, 512MB, 1.5GiB, or a plain number of bytes."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ArgumentTypeError(f"{text!r} is not a size such as 8GB, 512MB or 0")
    value = float(match[1]) * unit
    if value >= 1 << 60:
        raise ArgumentTypeError(f"{text} is more than any machine has")
    return int(value)


def duration(text: str) -> float:
    """Parse a time into seconds: 10m, 1h30m, a number of seconds; forever and negative: `inf`."""
    if text == "forever" or (text.startswith("-") and duration(text[1:]) >= 0):
        return math.inf
    parts = _DURATION_PART.findall(text)
    if not _DURATION.fullmatch(text):
        raise ArgumentTypeError(f"{text!r} is not a time such as 10m, 90s, 0 or forever")
    return float(sum(float(value) * _SECONDS_OF[unit] for value, unit in parts))


def gigabytes(text: str) -> int:
    """Parse a Mac's memory into GB: 64GB, as Apple writes it, or 64."""
    number = text.upper().removesuffix("GB").strip()
    if not _NUMBER.fullmatch(number):
        raise ArgumentTypeError(f"{text!r} is not a Mac's memory such as 64GB")
    return int(integer(4, 4096, " GB")(number))


def at_least(low: float, high: float = math.inf) -> Parse:
    """Returns a parser of finite numbers from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(value):
            raise ArgumentTypeError(f"{text!r} is not finite")
        if value < low:
            raise ArgumentTypeError(f"{value:g} is below {low:g}")
        if value > high:
            raise ArgumentTypeError(f"{value:g} is above {high:g}")
        return value

    return parse


real = at_least(-math.inf)


def characters(value: str) -> str:
    """Parse any text that is valid UTF-8, even an empty one."""
    try:
        value.encode()
    except UnicodeEncodeError:
        # Python decodes invalid bytes of the command line to lone surrogates.
        shown = os.fsencode(value)[:40]
        raise ArgumentTypeError(f"{shown!r} is not valid UTF-8") from None
    return value


def nonempty_text(value: str) -> str:
    """Parse any text that is valid UTF-8 and not empty."""
    if not value:
        raise ArgumentTypeError("it must not be empty")
    return characters(value)


def template_kwargs(text: str) -> dict[str, Any]:
    """Parse a JSON object whose values are strings, numbers and booleans."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArgumentTypeError("it is not a JSON object")
    for key, each in value.items():
        if not isinstance(each, str | int | float):
            raise ArgumentTypeError(f"{key} is neither a string nor a number nor a boolean")
    return value


def secret(value: str) -> str:
    """Parse an API key that a header can carry. No error message repeats a part of the key."""
    if (fault := key_fault(value)) is not None:
        raise ArgumentTypeError(f"the key {fault}")
    return value


def key_fault(key: str) -> str | None:
    """Returns the reason why a client can't send this API key; None if it can."""
    if not key:
        return "must not be empty"
    if key != key.strip():
        return "must not begin or end with white space, which a header would lose"
    if any(character < " " or character == "\x7f" for character in key):
        return "has a control character, which no header can carry"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    return None


def host_name(value: str) -> str:
    """Parse a host name without scheme and port, or *."""
    name = nonempty_text(value).lower().rstrip(".")
    if name != "*" and not _HOST.fullmatch(name):
        raise ArgumentTypeError(
            f"{value[:80]!r} is not a host name; give it without scheme and port, like my-mac.local"
        )
    return name


def origin(value: str) -> str:
    """Parse the origin of a web page, or *."""
    name = nonempty_text(value).lower()
    if name != "*" and not _ORIGIN.fullmatch(name):
        raise ArgumentTypeError(
            f"{value[:80]!r} is not an origin; give scheme, host and port alone, "
            "like https://chat.example or http://localhost:3000"
        )
    return name


def word_of(*choices: str) -> Parse:
    """Returns a parser that accepts only `choices`."""

    def parse(value: str) -> str:
        if value not in choices:
            raise ArgumentTypeError(f"{value!r} is not one of {', '.join(choices)}")
        return value

    return parse
