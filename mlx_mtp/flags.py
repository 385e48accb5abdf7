"""Command-line flags that may also come from the environment: --port is MLX_MTP_PORT.

The flag wins over the variable, the variable over the default.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mtp.errors import UsageError

PREFIX = "MLX_MTP_"
_NUMBER = re.compile(r"[+-]?[0-9]+")
_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?")
# Desktop applications and browsers' extensions have schemes of their own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}

Parse = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting.

    Args:
        name: as in "--port"; without dashes it is a positional argument that may be left out.
        help: one line; the default is added to it.
        parse: from text to the value, raising argparse.ArgumentTypeError; None for a boolean.
        default: where neither flag nor variable is given.
        metavar: names the value in the help.
        repeated: may be given several times, and its value is a tuple; the variable's has commas.
        group: the heading it stands under in the help.
        default_text: the default in words, where it isn't a constant.
    """

    name: str
    help: str
    parse: Parse | None = None
    default: Any = None
    metavar: str | None = None
    repeated: bool = False
    group: str | None = None
    default_text: str | None = None

    @property
    def shown_default(self) -> str:
        """The default for people; empty where there is none."""
        if self.default_text is not None:
            return self.default_text
        if self.default is None or self.default is False or self.default == ():
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def key(self) -> str:
        """The attribute's name."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable's name."""
        return PREFIX + self.key.upper()

    def from_text(self, text: str) -> Any:
        """The value of the environment variable."""
        parse = self.parse or boolean
        try:
            if self.repeated:
                return tuple(parse(each.strip()) for each in text.split(","))
            return parse(text)
        except argparse.ArgumentTypeError as error:
            raise UsageError(
                f"The environment variable {self.variable} is wrong: {error}"
            ) from None


def add_flags(parser: argparse.ArgumentParser, flags: Sequence[Flag]) -> None:
    """Add them without defaults, so that `resolve` can see which of them were given."""
    groups: dict[str, Any] = {}
    for flag in flags:
        where: Any = parser
        if flag.group is not None:
            if flag.group not in groups:
                groups[flag.group] = parser.add_argument_group(flag.group)
            where = groups[flag.group]
        default = f" (default: {flag.shown_default})" if flag.shown_default else ""
        options: dict[str, Any] = {"help": flag.help + default, "default": argparse.SUPPRESS}
        if flag.parse is None:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options.update(type=flag.parse, metavar=flag.metavar)
        if flag.repeated:
            options["action"] = "append"
        if not flag.name.startswith("-"):
            options["nargs"] = "?"
        where.add_argument(flag.name, **options)


def resolve(
    given: argparse.Namespace, flags: Sequence[Flag], environ: Mapping[str, str]
) -> argparse.Namespace:
    """Fill in what the command line left open; `given` has the keys of all but defaults.

    Raises:
        UsageError: a variable's value is wrong; the variable is named.
    """
    values = vars(given).copy()
    keys = set()
    for flag in flags:
        text = environ.get(flag.variable)
        if flag.key in values:
            if flag.repeated:
                values[flag.key] = tuple(values[flag.key])
        elif text is None:
            values[flag.key] = flag.default
            continue
        else:
            values[flag.key] = flag.from_text(text)
        keys.add(flag.key)
    return argparse.Namespace(**values, given=frozenset(keys))


def boolean(text: str) -> bool:
    """1, 0, true or false."""
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_BOOLEANS)}")
    return value


def whole(low: int, high: int) -> Parse:
    """An integer in a closed range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return parse


def word_or(word: str, parse: Parse) -> Parse:
    """A word, or what `parse` takes."""

    def parse_either(text: str) -> Any:
        if text == word:
            return word
        try:
            return parse(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, and it is not {word!r}") from None

    return parse_either


def count_or_path(value: str) -> int | Path:
    """A number from 1 on; anything else is a file."""
    if _NUMBER.fullmatch(value):
        return int(whole(1, 1 << 31)(value))
    return Path(text(value))


_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


def size(text: str) -> int:
    """Bytes: 8GB, 512MB, 1.5GiB, or a plain number of them."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8GB, 512MB or 0")
    value = float(found[1]) * unit
    if value >= 1 << 60:
        raise argparse.ArgumentTypeError(f"{text} is more than any machine has")
    return int(value)


def real(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not finite")
    return value


def at_least(low: float) -> Parse:
    """A finite number from `low` on."""

    def parse(text: str) -> float:
        value = real(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value:g} is below {low:g}")
        return value

    return parse


def characters(value: str) -> str:
    """Any text, the empty one too."""
    try:
        value.encode()
    except UnicodeEncodeError:
        # Python stands half characters in for the bytes that it can't decode.
        shown = os.fsencode(value)[:40]
        raise argparse.ArgumentTypeError(f"{shown!r} is not valid UTF-8") from None
    return value


def text(value: str) -> str:
    """Any text but the empty one."""
    if not value:
        raise argparse.ArgumentTypeError("it must not be empty")
    return characters(value)


def secret(value: str) -> str:
    """An API key: what a header can carry. No error repeats any of it."""
    reason = key_fault(value)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"the key {reason}")
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
    """A host's name without scheme and port, or *."""
    name = text(value).lower().rstrip(".")
    if name != "*" and not _HOST.fullmatch(name):
        raise argparse.ArgumentTypeError(
            f"{value[:80]!r} is not a host name; give it without scheme and port, like my-mac.local"
        )
    return name


def origin(value: str) -> str:
    """A web page's origin, or *."""
    given = text(value).lower()
    if given != "*" and not _ORIGIN.fullmatch(given):
        raise argparse.ArgumentTypeError(
            f"{value[:80]!r} is not an origin; give scheme, host and port alone, "
            "like https://chat.example or http://localhost:3000"
        )
    return given


def choices(*words: str) -> str:
    """A metavar that shows what may be chosen."""
    return f"{{{','.join(words)}}}"


def one_of(*choices: str) -> Parse:
    """One of a few words."""

    def parse(value: str) -> str:
        if value not in choices:
            raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(choices)}")
        return value

    return parse
