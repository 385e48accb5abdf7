"""The format of gpt-oss (Harmony). The first `<|start|>assistant` is the end of the prompt.

<|channel|>analysis<|message|>REASONING<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
    <|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
"""

from typing import Any

import regex

from mlx_mtp.text.parsing.answer import AnswerOver, AnswerParser, BrokenCall, Reader
from mlx_mtp.text.parsing.json_reader import read_value

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (_CHANNEL, _MESSAGE, _START, "<|constrain|>", *_ENDS)
"""Special tokens of the format: the parser must see them, and clients must not."""

_BODY_END = regex.compile("|".join(map(regex.escape, (*_ENDS, _START, _CHANNEL))))
_HEADER_END = regex.compile(regex.escape(_MESSAGE))
_RECIPIENT = regex.compile(r"to=functions\.([\w./:@-]{1,256})")
_CHANNEL_NAME = regex.compile(r"<\|channel\|>\s*(\w+)")
_OBJECT = regex.compile(r"\s*(?=\{)")
_SPACE = regex.compile(r"\s*(?=\S)")


class HarmonyParser(AnswerParser):
    """Reads reasoning, text and calls of one answer."""

    def read_answer(self) -> Reader[None]:
        while True:
            marker = yield from self.until(_BODY_END, self.emit_text)
            if marker.partial:
                self.emit_text(len(self.text))
                return
            self.in_reasoning = False
            if marker[0] in (_START, _CHANNEL):
                yield from self._read_header()
            else:
                self.pos = marker.end()

    def match(self, pattern: Any) -> Reader[Any]:
        """As in the base class, but a marker that ends a call's message breaks the call."""
        while self._call is not None:
            match = _BODY_END.match(self.text, self.pos, partial=True)
            if match and not match.partial:
                raise BrokenCall
            if match is None or self.over:
                break
            yield
        return (yield from super().match(pattern))

    def _read_header(self) -> Reader[None]:
        """Read a header, and if it is a call's, also the message."""
        start = self.position
        match = yield from self.until(_HEADER_END, lambda _: None)
        if match.partial:
            self.emit_text(len(self.text))  # An incomplete header is emitted as it is.
            raise AnswerOver
        header = self.text[self.pos : match.start()]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if recipient and not self.with_tools:
            self.emit_text(match.end())
        self.pos = match.end()
        if recipient and self.with_tools:
            yield from self.read_call(self._read_arguments(recipient[1]), start)
        elif not recipient:
            self.in_reasoning = channel is not None and channel[1] == "analysis"
        if self.in_reasoning:
            self.text += self.stops.flush()
            self.in_answer = False
        else:
            self.begin_answer()

    def _read_arguments(self, name: str) -> Reader[None]:
        self.begin_call(name)
        start = self.position
        try:
            yield from self.expect(_OBJECT)
            yield from read_value(self, self.emit_arguments)
        except (AnswerOver, BrokenCall):
            is_empty = self.position == start and (
                not self.rest or _BODY_END.match(self.text, self.pos)
            )
            if not is_empty:
                raise
            self.emit_arguments("{}")
        self.end_call()
        yield from self.match(_SPACE)
