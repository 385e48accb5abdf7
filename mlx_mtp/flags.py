"""Command-line flags, which precede environment variables (MLX_MTP_PORT for --port)."""

import argparse
import difflib
import math
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlx_mtp.console import say
from mlx_mtp.errors import UsageError

PREFIX = "MLX_MTP_"
_NUMBER = re.compile(r"[+-]?[0-9]+")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?")
# Desktop applications and browser extensions have schemes of their own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}

Parse = Callable[[str], Any]


def print_error(message: str, command: str = "mlx-mtp") -> None:
    """Print an error on one line of standard error, whatever a library or a file puts in it."""
    say(f"{command}: {' '.join(message.split())}", file=sys.stderr)


class CommandParser(argparse.ArgumentParser):
    """argparse with one-line errors, without the usage, which for `serve` is a screen of flags."""

    def error(self, message: str) -> NoReturn:
        print_error(f"{message} (see {self.prog} --help)", self.prog)
        self.exit(2)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Reject what is left over here, so that the error names the subcommand's help."""
        self._given = set[str]()
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            hints = [hint(word.partition("=")[0], known) for word in rest if word[:1] == "-"]
            self.error(f"unrecognized arguments: {' '.join(rest)}{''.join(hints)}")
        return found, rest

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """What is no list is given once, in whatever form: argparse takes the last silently."""
        if arg_strings or action.option_strings:  # else an argument that is left out
            if action.dest in self._given and not isinstance(action, argparse._AppendAction):
                raise argparse.ArgumentError(action, "it is given twice")
            self._given.add(action.dest)
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = [str(each) for each in action.choices]
            told = hint(str(value), words) or f" (choose from {', '.join(words)})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{told}")


def hint(word: str, known: Iterable[str]) -> str:
    """What a mistyped word probably meant, to be put behind an error; or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, in the help and in the environment."""

    # "server: --port N": heading, if any, name and placeholder. Without dashes: an argument that
    # may be left out, and that may be given by a flag of that name as well.
    usage: str
    help: str  # One line; the default is appended to it.
    # Converts text, raising ArgumentTypeError; or the words it may be; None for a boolean.
    parse: Parse | tuple[str, ...] | None = None
    default: Any = None
    repeated: bool = False  # Its value is a tuple, and the variable has commas.
    default_text: str | None = None  # The default in words, where it isn't a constant.

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
    def convert(self) -> Parse:
        return one_of(*self.parse) if isinstance(self.parse, tuple) else self.parse or boolean

    def from_text(self, text: str) -> Any:
        """Parse the environment variable's text; raises UsageError, naming the variable."""
        parse = self.convert
        try:
            if self.repeated:
                return tuple(parse(each.strip()) for each in text.split(","))
            return parse(text)
        except ArgumentTypeError as error:
            fault = f"The environment variable {self.variable} is wrong: {error}"
            raise UsageError(fault) from None


def add_flags(
    parser: argparse.ArgumentParser, *flags: Flag, reads_environment: bool = False
) -> None:
    """Add flags; with `reads_environment` in groups, and without the defaults for `resolve`."""
    groups: dict[str | None, Any] = {None: parser}
    for flag in flags:
        group = flag.group if reads_environment else None
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        shown = f" (default: {flag.shown_default})" if flag.shown_default else ""
        default = argparse.SUPPRESS if reads_environment else flag.default
        options: dict[str, Any] = {"help": flag.help + shown, "default": default}
        if flag.parse is None:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": flag.convert, "metavar": flag.metavar}
        if flag.repeated:
            options["action"] = "append"
        if flag.name.startswith("-"):
            groups[group].add_argument(flag.name, **options)
            continue
        if not reads_environment:
            parser.set_defaults(**{flag.key: flag.default})
        options["default"] = argparse.SUPPRESS
        groups[group].add_argument(flag.name, nargs="?", **options)
        options["help"] = argparse.SUPPRESS
        groups[group].add_argument(f"--{flag.name}", **options)


def resolve(
    given: argparse.Namespace, flags: Sequence[Flag], environ: Mapping[str, str]
) -> argparse.Namespace:
    """Add what the command line left open, from the environment or the defaults.

    In `given` are the keys of the flags that aren't defaults. UsageError names a wrong variable.
    """
    found = {flag.key: getattr(given, flag.key) for flag in flags if flag.key in given}
    for flag in flags:
        if flag.key in found and flag.repeated:
            found[flag.key] = tuple(found[flag.key])
        elif flag.key not in found and (text := environ.get(flag.variable)) is not None:
            found[flag.key] = flag.from_text(text)
    values = {flag.key: flag.default for flag in flags} | vars(given) | found
    return argparse.Namespace(**values, given=frozenset(found))


# Parsers of values. Each raises ArgumentTypeError with what is wrong.


def boolean(text: str) -> bool:
    """1, 0, true or false."""
    return _BOOLEANS[one_of(*_BOOLEANS)(text.lower())]


def whole(low: int, high: int) -> Parse:
    """An integer in a closed range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return parse


def word_or(word: str, parse: Parse) -> Parse:
    """A word, or what `parse` accepts."""

    def parse_either(text: str) -> Any:
        if text == word:
            return word
        try:
            return parse(text)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{error}, and it is not {word!r}") from None

    return parse_either


def count_or_path(value: str) -> int | Path:
    """A number from 1; anything else is a file's path."""
    if _NUMBER.fullmatch(value):
        return int(whole(1, 1 << 31)(value))
    return Path(text(value))


def size(text: str) -> int:
    """Bytes: 8GB, 512MB, 1.5GiB, or a plain number of them."""
    found = _SIZE.fullmatch(text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise ArgumentTypeError(f"{text!r} is not a size such as 8GB, 512MB or 0")
    value = float(found[1]) * unit
    if value >= 1 << 60:
        raise ArgumentTypeError(f"{text} is more than any machine has")
    return int(value)


def gigabytes(text: str) -> int:
    """A Mac's memory, as Apple writes it: 64GB, or 64."""
    number = text.upper().removesuffix("GB").strip()
    if not _NUMBER.fullmatch(number):
        raise ArgumentTypeError(f"{text!r} is not a Mac's memory such as 64GB")
    return int(whole(4, 4096)(number))


def at_least(low: float, high: float = math.inf) -> Parse:
    """A finite number from `low` to `high`."""

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
    """Any text, also an empty one."""
    try:
        value.encode()
    except UnicodeEncodeError:
        # Python decodes invalid bytes of the command line to lone surrogates.
        shown = os.fsencode(value)[:40]
        raise ArgumentTypeError(f"{shown!r} is not valid UTF-8") from None
    return value


def text(value: str) -> str:
    """Any text that is not empty."""
    if not value:
        raise ArgumentTypeError("it must not be empty")
    return characters(value)


def secret(value: str) -> str:
    """An API key that a header can carry. No error repeats any of it."""
    if (fault := key_fault(value)) is not None:
        raise ArgumentTypeError(f"the key {fault}")
    return value


def key_fault(key: str) -> str | None:
    """Why a client could not send this API key; None if it could."""
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
    """A host name without scheme and port, or *."""
    name = text(value).lower().rstrip(".")
    if name != "*" and not _HOST.fullmatch(name):
        raise ArgumentTypeError(
            f"{value[:80]!r} is not a host name; give it without scheme and port, like my-mac.local"
        )
    return name


def origin(value: str) -> str:
    """The origin of a web page, or *."""
    given = text(value).lower()
    if given != "*" and not _ORIGIN.fullmatch(given):
        raise ArgumentTypeError(
            f"{value[:80]!r} is not an origin; give scheme, host and port alone, "
            "like https://chat.example or http://localhost:3000"
        )
    return given


def one_of(*choices: str) -> Parse:
    """One of a few words."""

    def parse(value: str) -> str:
        if value not in choices:
            raise ArgumentTypeError(f"{value!r} is not one of {', '.join(choices)}")
        return value

    return parse
