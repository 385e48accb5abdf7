"""Calls as tags, as Qwen3-Coder and Qwen3.5 write them:
`<function=NAME><parameter=KEY>VALUE</parameter></function>`."""

from collections.abc import Container, Mapping
from typing import Any

import regex

from mlx_mtp.text.parsing.answer import AnswerOver, AnswerParser, BrokenCall, Reader
from mlx_mtp.text.parsing.bare_values import (
    as_list,
    begun_json,
    begun_string,
    json_text,
    value_types,
)
from mlx_mtp.text.parsing.json_reader import read_value
from mlx_mtp.text.parsing.tags import CALL, CLOSER, EXACT_CLOSERS, FUNCTION, MAX_NAME, PARAMETER

_NAME = regex.compile(rf"([^>\r\n<]{{0,{MAX_NAME - 1}}})>")
_QUOTES = " \t\"'`"
_MAX_DEPTH = 16  # maximum depth of the tags of an example
_FIRST = regex.compile(rf"""\s*(?:(?P<parameter>{PARAMETER})|{CLOSER}|(?=\{{\s*["'}}]))""")
_PARAMETER = regex.compile(rf"\s*{PARAMETER}")
CLOSING = regex.compile(rf"\s*{CLOSER}")
_BRACES = regex.compile(r"(?:\s*\})+(?=\s*[^\s}])")
_LINE = regex.compile(r"\n|(?=[^\n])")
_ATTRIBUTES = rf"\s[^<>\n]{{0,{MAX_NAME}}}(?<!/)"  # attributes of tags in XML that is no call
_TAG = regex.compile(
    rf"(?:\n[ \t]{{0,64}})?(?P<tag>{CLOSER}|<(?P<opens>tool_call)>|<(?:(?P<opens>param)eter|"
    rf"(?P<opens>func)tion)(?:=(?P<key>[^<>\r\n]{{1,{MAX_NAME}}})|{_ATTRIBUTES})?>)"
)
_EXACT = f"(?:{'|'.join(EXACT_CLOSERS)}|{PARAMETER})"
_BEHIND_EXACT = regex.compile(rf"\s*(?:{_EXACT}|{CLOSER}|{CALL}|{FUNCTION})")
# A tag before the parameter's own intact one is no mangled closing tag, but text of the value.
_BEHIND_MANGLED = regex.compile(rf"(?!\s*{EXACT_CLOSERS[0]})(?:\s*{CLOSER})*\s*{_EXACT}")


def read_function(parser: AnswerParser, name: str) -> Reader[None]:
    """Read a call after its function's tag; it begins when no later text can make it content."""
    while (first := (yield from parser.expect(_FIRST)))["closes"] == "param":
        pass
    if first["parameter"]:
        key = yield from read_name(parser)
        parser.begin_call(name)
        yield from _read_parameters(parser, parser.schemas.get(name, {}), key)
    elif first["closes"]:
        parser.begin_call(name)
        parser.emit_arguments("{}")
    else:
        parser.begin_call(name)
        yield from read_value(parser, parser.emit_arguments)
    parser.end_call()
    yield from parser.match(_BRACES)


def read_name(parser: AnswerParser) -> Reader[str]:
    """Read a function's or parameter's name and the end of its tag; BrokenCall without a name."""
    name = str((yield from parser.expect(_NAME))[1]).strip(_QUOTES)
    if not name:
        raise BrokenCall
    return name


def _read_parameters(parser: AnswerParser, schema: Mapping[str, Any], key: str) -> Reader[None]:
    """Read the parameters after the first one's name, `key`, up to the call's closing tags."""
    properties = schema.get("properties")
    awaited = set(properties) if isinstance(properties, Mapping) else set()
    # Arguments that are cut off begin with a brace, so clients don't take them for no arguments.
    separator, given = "{", list[str]()
    while key not in given:
        parser.emit_arguments(f'{separator}{begun_string(key)}": ')
        separator = ", "
        given.append(key)
        awaited.discard(key)
        yield from _Value(parser, key, value_types(schema, key)).read(awaited)
        closed = "param"
        while closed == "param" and (tag := (yield from parser.look(CLOSING))):
            closed = tag["closes"]
        # Without closing tags, this is a call only if it has all required parameters.
        if closed != "param" or not (yield from parser.look(_PARAMETER)):
            required = as_list(schema.get("required", []))
            if closed == "param" and not all(name in given for name in required):
                break
            parser.emit_arguments("}")
            return
        try:
            key = yield from read_name(parser)
        except AnswerOver:
            parser.emit_arguments(separator + begun_string(parser.rest))
            raise
    raise BrokenCall


class _Value:
    """A parameter's value, which ends at a closing tag.

    The value can contain an example of a call, with tags. The example's text is certain only when
    its tags are balanced and the value's own closing tag has arrived.
    """

    def __init__(self, parser: AnswerParser, key: str, types: frozenset[str]) -> None:
        self._parser, self._key, self._types = parser, key, types
        self._streamed = types == {"string"}
        self._start = self._sent = parser.pos  # positions in the parser's text
        self._opened: list[str] = []  # an example's tags that are not closed yet
        self._outermost = ""  # the tag that the first example begins with
        self._example: int | None = None  # where the example begins
        self._tag_end = parser.pos  # end of the last tag

    def read(self, awaited: Container[str]) -> Reader[None]:
        """Read up to the tag that ends the value, which can open an `awaited` parameter."""
        parser = self._parser
        if self._streamed:
            parser.emit_arguments('"')
        try:
            yield from self._read_line_break()
            while not (yield from self._read_tag(awaited)):
                pass
        except AnswerOver:
            certain, rest = parser.text[self._start : parser.pos], parser.rest
            if self._example is not None:
                certain, rest = parser.text[self._start : self._example], ""
            if rest.lstrip().startswith(EXACT_CLOSERS):
                self._emit_end(certain)
            elif self._streamed:
                self._emit(self._sent + len(rest))
            else:
                parser.emit_arguments(begun_json(certain + rest, certain, self._types))
            raise
        self._emit(parser.pos)
        self._emit_end(parser.text[self._start : parser.pos])

    def _emit(self, end: int) -> None:
        if self._streamed:
            self._parser.emit_arguments(begun_string(self._parser.text[self._sent : end])[1:])
        self._sent = end

    def _emit_end(self, value: str) -> None:
        self._parser.emit_arguments('"' if self._streamed else json_text(value, self._types))

    def _read_line_break(self) -> Reader[None]:
        yield from self._parser.match(_LINE)
        self._start = self._sent = self._tag_end = self._parser.pos

    def _read_to(self, end: int) -> None:
        self._parser.pos = end
        if self._example is None:
            self._emit(end)

    def _read_tag(self, awaited: Container[str]) -> Reader[bool]:
        """Read up to the next tag; returns True if it ends the value, else reads the tag too."""
        parser = self._parser
        match = yield from parser.until(_TAG, self._read_to)
        if match.partial:
            if parser.cut or self._example is None:
                raise AnswerOver
            return self._end_at_example()
        opens, closes, at = match["opens"], match["closes"], match.start("tag")
        key = (match["key"] or "").strip(_QUOTES)
        if opens and not self._opened and key in awaited and parser.text[at - 1] not in _QUOTES:
            return True
        if opens == "param" and key == self._key and not parser.text[self._start : at].strip():
            parser.pos = match.end()  # The model wrote the parameter's tag twice.
            yield from self._read_line_break()
            return False
        if opens and (self._opened or self._stands(at)):
            if self._example is None:
                self._example, self._outermost = match.start(), opens
            self._opened.append(opens)
            if len(self._opened) > _MAX_DEPTH:
                return self._end_at_example()
        elif closes and self._opened:
            if match["tag"] in EXACT_CLOSERS and closes != self._opened.pop():
                return self._end_at_example()
        elif closes and (yield from self._is_end(match)):
            is_own = closes == "param" or (closes == "func" and self._outermost != "param")
            return self._example is None or is_own or self._end_at_example()
        self._tag_end = match.end()
        self._read_to(match.end())
        return False

    def _end_at_example(self) -> bool:
        """End the value where an example seemed to begin: the tags are the call's own."""
        assert self._example is not None, "an example has begun"
        self._parser.pos = self._example
        return True

    def _stands(self, at: int) -> bool:
        """Returns True if a tag is first in its line or in the value, or follows another tag."""
        text = self._parser.text
        while text[at - 1] in " \t":
            at -= 1
        return text[at - 1] == "\n" or at <= self._tag_end

    def _is_end(self, match: Any) -> Reader[bool]:
        """Returns True if a closing tag is the value's: it begins a line, or another tag follows.

        A mangled closing tag must be followed by an intact tag, but not by `</parameter>`.
        """
        is_exact, parser = match["tag"] in EXACT_CLOSERS, self._parser
        if is_exact and self._stands(match.start("tag")):
            return True
        pattern = _BEHIND_EXACT if is_exact else _BEHIND_MANGLED
        while (after := pattern.match(parser.text, match.end(), partial=True)) and after.partial:
            if parser.cut:
                raise AnswerOver
            if parser.over:
                return is_exact
            yield
        return after is not None
