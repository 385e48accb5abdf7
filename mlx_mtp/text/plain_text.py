"""Keeps clients' text from becoming special tokens (--special-tokens-in-messages text).

A mark is inserted into each special token's name in a client's text. The prompt is split at the
marks, and its parts are encoded separately.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

# The objects that the server builds for a template, by their place in the chat. Their keys, and the
# values of the keys listed here, are the API's; every other text in a chat is the client's.
_API_WORDS: Mapping[tuple[str, ...], frozenset[str]] = {
    (): frozenset(),
    ("messages",): frozenset({"role"}),
    ("messages", "tool_calls"): frozenset({"type"}),
    ("messages", "tool_calls", "function"): frozenset(),
    ("tools",): frozenset({"type"}),
    ("tools", "function"): frozenset(),
    ("template_kwargs",): frozenset(),
}
_MARK_DIGITS = 20
_MOST_COMPARED = 64  # maximum characters of a name that are compared
_MOST_PUNCTUATION = 8  # maximum characters per side: a hostile tokenizer can have 8,192 names
_PARTS_OF_NAME = re.compile(r"([\W_]*).*?([\W_]*)", re.DOTALL)


class _Names(NamedTuple):
    """What to find in a client's text: names, and parts that a template can complete to a name.

    A template can write `"<" ~ key ~ ">"`. Names and parts are compared in lower case.
    """

    whole: re.Pattern[str]  # a name's first character, if the rest follows
    begun: frozenset[str]  # beginnings of names, to find at a text's end
    ended: frozenset[str]  # ends of names, to find at a text's beginning
    inner: frozenset[str]  # names stripped of punctuation, to compare with a whole text
    longest: int  # characters of the longest text in `begun`, `ended` and `inner`


def marked(chat: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Returns the chat with a mark in each occurrence of the names, and the mark.

    `chat` has `messages`, `tools` and `template_kwargs` as a template gets them. Each chat gets new
    random digits as its mark: no client can guess them, and templates' filters keep digits.
    """
    patterns = _patterns_of(frozenset(name for name in names if len(name) > 1))
    mark = f"{secrets.randbelow(10**_MARK_DIGITS):0{_MARK_DIGITS}}"

    def within(part: Any, *place: str) -> Any:
        if isinstance(part, str):
            return _marked_text(part, patterns, mark)
        if isinstance(part, list | tuple):
            return [within(inner, *place) for inner in part]
        if not isinstance(part, Mapping):
            return part
        words = _API_WORDS.get(place)
        if words is None:
            return {within(key): within(inner, *place, key) for key, inner in part.items()}
        return {
            key: inner if key in words else within(inner, *place, key)
            for key, inner in part.items()
        }

    return within(chat), mark


def _marked_text(text: str, names: _Names, mark: str) -> str:
    def put(piece: str) -> str:
        return names.whole.sub(lambda match: match[0] + mark, piece)

    # A template can trim the text, so compare the text without outer white space.
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    start = text[first : first + names.longest + 1].lower()
    end = text[max(first, last - names.longest) : last].lower()
    lengths = range(1, names.longest + 1)
    before = after = ""
    if start.rstrip() in names.inner or any(start[:n] in names.ended for n in lengths):
        before, text, last = put(text[:first]) + mark, text[first:], last - first
    # A cheap test first: `begun` has names' first characters.
    if not names.begun.isdisjoint(end) and any(end[-n:] in names.begun for n in lengths):
        text, after = text[:last], mark + put(text[last:])
    return before + put(text) + after


@lru_cache(maxsize=1)
def _patterns_of(names: frozenset[str]) -> _Names:
    begun, ended, inner = set[str](), set[str](), set[str]()
    compared = {name[:_MOST_COMPARED].lower() for name in names}
    for name in compared:
        parts, size = _PARTS_OF_NAME.fullmatch(name), len(name)
        assert parts is not None
        left, right = (min(len(part), _MOST_PUNCTUATION) for part in parts.groups())
        begun.update(name[:n] for n in range(1, size) if left)
        ended.update(name[n:] for n in range(1, min(left + 1, size)))
        inner.update(name[n:-m] for n in range(1, left + 1) for m in range(1, right + 1))
    rests: dict[str, set[str]] = {}
    for name in compared:
        rests.setdefault(name[0], set()).add(name[1:])
    whole = "|".join(f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in rests.items())
    return _Names(
        re.compile(whole or r"(?!)", re.IGNORECASE),
        frozenset(begun),
        frozenset(ended),
        frozenset(inner),
        max(map(len, begun | ended | inner), default=0),
    )


def _any_of(texts: set[str]) -> str:
    """Returns a pattern that matches any of these texts and reads each character once."""
    if "" in texts:
        return ""
    branches = [
        re.escape(first) + _any_of({text[1:] for text in texts if text[0] == first})
        for first in sorted({text[0] for text in texts})
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
