"""Answers of Qwen's models: a think block, then text with tool calls in it; either may be missing.

Newlines next to the block's tags and white space next to a call belong to the template and are
dropped; everything else is kept.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from mlx_mtp.server.parsing.answer import AnswerOver, AnswerParser, BrokenCall, Reader
from mlx_mtp.server.parsing.events import Reasoning

OPEN, CLOSE = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
MAX_NAME = 256
_NAME = re.compile(rf"[\w./:@-]{{1,{MAX_NAME}}}")
_TAG = re.compile("<[^<>]*>")
_CLOSE = re.compile(CLOSE)
# Some models call a tool without closing the block first. Only what looks like a call all through
# counts: a model may well think about the tag.
_CLOSE_OR_CALL = re.compile(rf'{CLOSE}|(?={CALL}\s*(?:<function=|\{{\s*"))')
_CALL_BEGUN = re.compile(
    rf"{CALL}\s*(?:\{{\s*|" + "|".join("<function="[:length] for length in range(10)) + ")$"
)


class QwenParser(AnswerParser):
    """The base of both formats of calls; by itself it reads none.

    Args:
        think: the answer may begin with a think block.
        opened: the prompt ends within that block.
        schemas: the JSON schema of each tool's parameters, by its name; None: calls are text.
        max_calls: the answer ends with so many; None: there is no such limit.
    """

    def __init__(
        self,
        *,
        think: bool,
        opened: bool,
        schemas: Mapping[str, Mapping[str, Any]] | None,
        max_calls: int | None = None,
    ) -> None:
        super().__init__(max_calls)
        self.in_reasoning = think and opened
        self._think = think
        self._with_tools = schemas is not None
        self.schemas = schemas or {}

    def openers(self) -> Collection[str]:
        """Tags that a call begins with."""
        return {CALL}

    def read_body(self, opener: str) -> Reader[None]:
        """Read a call behind its opener."""
        raise NotImplementedError

    def begin_call(self, name: str) -> None:
        if name not in self.schemas and not _NAME.fullmatch(name):
            raise BrokenCall
        super().begin_call(name)

    def read(self) -> Reader[None]:
        if self._think:
            with contextlib.suppress(AnswerOver):
                # A model may repeat the tag that the prompt ended with.
                self.in_reasoning |= bool((yield from self.find(OPEN)))
        if self.in_reasoning:
            yield from self._read_reasoning()
        yield from self._read_calls() if self._with_tools else self.read_text()

    def _read_reasoning(self) -> Reader[None]:
        end = _CLOSE_OR_CALL if self._with_tools else _CLOSE
        emitted = False
        while True:
            found, over = end.search(self.text, self.pos), self.over
            text = self.text[self.pos : found.start() if found else self._certain_reasoning()]
            text = text if over and not found else text.rstrip("\n")
            self.pos += len(text)
            text = text if emitted else text.lstrip("\n")
            if text:
                self.emit(Reasoning(text))
                emitted = True
            if found:
                break
            if over:
                raise AnswerOver
            yield from self.more()
        self.pos, self.in_reasoning = found.end(), False
        while (yield from self.peek()) == "\n":
            self.pos += 1

    def _certain_reasoning(self) -> int:
        """Where the text ends that can't be the beginning of what ends the block."""
        if self.over:
            return len(self.text)
        if not self._with_tools:
            return self.certain([CLOSE])
        call = _CALL_BEGUN.search(self.text, self.pos)
        return call.start() if call else self.certain([CLOSE, CALL])

    def _read_calls(self) -> Reader[None]:
        openers = self.openers()
        while True:
            tags = _TAG.finditer(self.text, self.pos)
            found = next((tag for tag in tags if tag[0] in openers), None)
            end = found.start() if found else self.certain(openers)
            self.emit_text(self.pos + len(self.text[self.pos : end].rstrip()))
            if found:
                # With the white space before it: if the call breaks, all of it is content.
                start, self.pos = self.at, found.end()
                yield from self.read_call(self.read_body(found[0]), start)
            elif not (yield from self.more()):
                if self.rest.strip() or not self.num_calls:
                    self.emit_text(len(self.text))
                return
