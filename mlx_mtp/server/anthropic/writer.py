"""Whole messages and stream events in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlx_mtp.server.choice import Content, Delta, Piece
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.http_errors import anthropic_error_body
from mlx_mtp.server.parsing.events import Reasoning, ToolArguments, ToolStart
from mlx_mtp.server.seal import sealed
from mlx_mtp.server.whole import Answer, CallPart, Part, ReasoningPart, TextPart
from mlx_mtp.server.writer import event, new_id

SIGNATURE = "mlx-mtp"
"""Clients send thinking blocks back only if they are signed; whoever signs is not looked at."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """/v1/messages.

    Args:
        message_id: of the answer.
        model: its name.
        seed: of the answer, which is told so that it can be asked for again.
        omit_thinking: tell that the model thinks, but not what.
    """

    keep_alive = event({"type": "ping"}, "ping")
    done = b""

    def __init__(
        self, message_id: str, model: str, seed: int, *, omit_thinking: bool = False
    ) -> None:
        self.message_id = message_id
        self._model = model
        self._seed = seed
        self._omit_thinking = omit_thinking
        self._thought = ""
        self._block = -1
        self._kind: str | None = None
        self._last: Delta | None = None

    def opening(self, generation: Generation) -> Iterable[bytes]:
        """The message without its content."""
        message = self._message([], None, None) | {"usage": usage_fields(generation)}
        yield _event("message_start", message=message)

    def delta(self, delta: Delta, generation: Generation) -> Iterable[bytes]:
        """Each piece goes into the block that is open, or opens one of its kind."""
        for piece in delta.pieces:
            yield from self._piece(piece)
        if delta.finish_reason is not None:
            self._last = delta

    def ending(self, generation: Generation) -> Iterable[bytes]:
        """Why it ended, and what it cost."""
        yield from self._close()
        assert self._last is not None, "the answer has ended"
        reason = {
            "stop_reason": _stop_reason(self._last),
            "stop_sequence": self._last.stop,
        }
        usage = usage_fields(generation)
        yield _event("message_delta", delta=reason, usage=usage, seed=self._seed)
        yield _event("message_stop")

    def failure(self, error: Exception) -> Iterable[bytes]:
        """The error, as its HTTP answer would have had it."""
        yield event(anthropic_error_body(error), "error")

    def whole(self, answers: Sequence[Answer], generation: Generation) -> dict[str, Any]:
        """The message."""
        (answer,) = answers
        content = [self._block_of(part) for part in _shown(answer.parts) if not _is_empty(part)]
        message = self._message(content, _stop_reason(answer), answer.stop)
        return message | {"usage": usage_fields(generation)}

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None
    ) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            # Not of this API.
            "seed": self._seed,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
        }

    def _block_of(self, part: Part) -> dict[str, Any]:
        """A block of a whole message."""
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        if isinstance(part, ReasoningPart):
            if self._omit_thinking:
                return {"type": "thinking", "thinking": "", "signature": sealed(part.text)}
            return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
        # Complete calls have an object for arguments: the parsers see to that.
        arguments = json.loads(part.arguments)
        return {"type": "tool_use", "id": new_id("toolu"), "name": part.name, "input": arguments}

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Content):
            if piece.text:
                yield from self._open("text", {"type": "text", "text": ""})
                yield self._delta("text_delta", text=piece.text)
        elif isinstance(piece, Reasoning):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._open("thinking", block)
            self._thought += piece.text
            if not self._omit_thinking:
                yield self._delta("thinking_delta", thinking=piece.text)
        elif isinstance(piece, ToolStart):
            yield from self._close()
            call = {"type": "tool_use", "id": new_id("toolu"), "name": piece.name}
            yield from self._open("tool_use", {**call, "input": {}})
        elif isinstance(piece, ToolArguments):
            yield self._delta("input_json_delta", partial_json=piece.text)
        else:
            yield from self._close()

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._kind == kind:
            return
        yield from self._close()
        self._block += 1
        self._kind = kind
        yield _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._kind is None:
            return
        if self._kind == "thinking":
            signature = sealed(self._thought) if self._omit_thinking else SIGNATURE
            yield self._delta("signature_delta", signature=signature)
            self._thought = ""
        yield _event("content_block_stop", index=self._block)
        self._kind = None

    def _delta(self, kind: str, **fields: str) -> bytes:
        delta = {"type": kind, **fields}
        return _event("content_block_delta", index=self._block, delta=delta)


def usage_fields(generation: Generation) -> dict[str, Any]:
    """The counts in Anthropic's form: `input_tokens` are those that were computed."""
    usage = generation.usage()
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _shown(parts: Iterable[Part]) -> list[Part]:
    """The parts as blocks can have them.

    A `tool_use` has an object for its input, and an object that is made of half a call looks like a
    whole one: a client would write half a file. So a call that is cut is text here; in a stream its
    input is left open, which no client can take for whole.
    """
    shown: list[Part] = []
    for part in parts:
        if isinstance(part, CallPart) and part.cut is not None:
            last = shown[-1] if shown else None
            if isinstance(last, TextPart):
                shown[-1] = TextPart(last.text + part.cut)
            else:
                shown.append(TextPart(part.cut))
        else:
            shown.append(part)
    return shown


def _is_empty(part: Part) -> bool:
    return isinstance(part, TextPart) and not part.text


def _stop_reason(answer: Delta | Answer) -> str:
    if answer.stop is not None and answer.finish_reason == "stop":
        return "stop_sequence"
    return _STOP_REASONS[answer.finish_reason or "stop"]


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
