"""gpt-oss's own format: messages on channels, each with a header and a body.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
        <|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>

The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re

from mlx_mtp.server.parsing.answer import AnswerOver, AnswerParser, BrokenCall, Reader
from mlx_mtp.server.parsing.events import Reasoning
from mlx_mtp.server.parsing.json_reader import read_value

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (_CHANNEL, _MESSAGE, _START, "<|constrain|>", *_ENDS)
"""Special tokens of the format: the parser has to see them, and clients never do."""

_BODY_END = re.compile("|".join(map(re.escape, (*_ENDS, _START, _CHANNEL))))
_RECIPIENT = re.compile(r"to=functions\.([\w./:@-]{1,256})")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(AnswerParser):
    """Reasoning, text and calls of one answer; without tools calls are text."""

    def __init__(self, *, with_tools: bool, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._with_tools = with_tools

    def read(self) -> Reader[None]:
        while True:
            marker = yield from self._read_body()
            self.in_reasoning = False
            if marker in (_START, _CHANNEL):
                yield from self._read_header()
            else:
                self.pos += len(marker)

    def peek(self) -> Reader[str]:
        """The next character; where a marker ends a call's message, that breaks it."""
        character = yield from super().peek()
        if self._call is not None and character == "<":
            while self.certain(MARKERS) == self.pos and (yield from self.more()):
                pass
            if _BODY_END.match(self.text, self.pos):
                raise BrokenCall
        return character

    def _read_body(self) -> Reader[str]:
        """Up to the marker after a message; it is returned, and stays unread."""
        while True:
            found, over = _BODY_END.search(self.text, self.pos), self.over
            end = found.start() if found else self.certain(() if over else MARKERS)
            if self.in_reasoning and end > self.pos:
                self.emit(Reasoning(self.text[self.pos : end]))
                self.pos = end
            self.emit_text(end)
            if found:
                return found[0]
            if over:
                raise AnswerOver
            yield from self.more()

    def _read_header(self) -> Reader[None]:
        """Up to the message, which the header describes; of a call the message too."""
        while (end := self.text.find(_MESSAGE, self.pos)) < 0:
            if not (yield from self.more()):
                self.emit_text(len(self.text))  # A header that is cut is kept as it is.
                raise AnswerOver
        header, start = self.text[self.pos : end], self.at
        end += len(_MESSAGE)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if recipient and self._with_tools:
            self.pos = end
            yield from self.read_call(self._read_arguments(recipient[1]), start)
        elif recipient:
            self.emit_text(end)
        else:
            self.pos = end
            self.in_reasoning = channel is not None and channel[1] == "analysis"

    def _read_arguments(self, name: str) -> Reader[None]:
        start = self.at
        self.begin_call(name)
        try:
            first = yield from self.space()
        except (AnswerOver, BrokenCall):
            if self.at > start:
                raise
            self.emit_arguments("{}")  # A message without any text.
        else:
            if first != "{":
                raise BrokenCall
            yield from read_value(self, self.emit_arguments)
        self.end_call()
        yield from self.space()
