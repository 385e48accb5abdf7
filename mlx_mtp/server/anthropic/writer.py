"""Whole messages and stream events in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mlx_mtp.server.generation import Generation
from mlx_mtp.server.http_errors import anthropic_error_body
from mlx_mtp.server.output_stream import Delta
from mlx_mtp.server.text import wrap
from mlx_mtp.server.writer import Block, BlockWriter, Content, event, new_id

SIGNATURE = "mlx-mtp"
"""Clients send thinking blocks back only if they have a signature, which they don't look into."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter(BlockWriter):
    """/v1/messages.

    Args:
        model: its name.
        seed: of the answer, which clients get so that they can ask for the same again.
        omit_thinking: say that the model thinks, but not what.
    """

    keep_alive = event({"type": "ping"}, "ping")

    def __init__(self, model: str, seed: int, *, omit_thinking: bool = False) -> None:
        super().__init__(new_id("msg"))
        self._model = model
        self._seed = seed
        self._omit_thinking = omit_thinking
        self._index = -1
        self._content: list[dict[str, Any]] = []

    def opening(self, generation: Generation) -> Iterable[bytes]:
        message = self._message([], None, None) | {"usage": usage_fields(generation)}
        yield _event("message_start", message=message)

    def ending(self, generation: Generation) -> Iterable[bytes]:
        reason = {"stop_reason": _stop_reason(self.last), "stop_sequence": self.last.stop}
        usage = usage_fields(generation)
        yield _event("message_delta", delta=reason, usage=usage, seed=self._seed)
        yield _event("message_stop")

    def failure(self, error: Exception) -> Iterable[bytes]:
        yield event(anthropic_error_body(error), "error")

    def start(self, block: Block) -> Iterable[bytes]:
        self._index += 1
        empty: dict[str, Any] = {"type": "text", "text": ""}
        if block.kind == "reasoning":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        elif block.kind == "call":
            empty = {"type": "tool_use", "id": new_id("toolu"), "name": block.name, "input": {}}
        self._content.append(empty)
        yield _event("content_block_start", index=self._index, content_block=empty)

    def add(self, block: Block, content: Content) -> Iterable[bytes]:
        if block.kind == "text":
            yield self._delta("text_delta", text=content.text)
        elif block.kind == "call":
            yield self._delta("input_json_delta", partial_json=content.text)
        elif not self._omit_thinking:
            yield self._delta("thinking_delta", thinking=content.text)

    def stop(self, block: Block) -> Iterable[bytes]:
        whole = self._content[-1]
        if block.kind == "text":
            whole["text"] = block.text
        elif block.kind == "reasoning":
            whole["thinking"] = "" if self._omit_thinking else block.text
            whole["signature"] = wrap(block.text) if self._omit_thinking else SIGNATURE
            yield self._delta("signature_delta", signature=whole["signature"])
        elif block.state == "complete":
            # Complete calls have an object for arguments: the parsers see to that.
            whole["input"] = json.loads(block.text)
        elif block.state == "cut":
            # A `tool_use` has an object for its input, and an object made of half a call looks like
            # a whole one: a client would write half a file. So a call that is cut is text in a
            # whole message; in a stream its input is left open, which no client takes for whole.
            self._content[-1] = {"type": "text", "text": block.raw}
            if len(self._content) > 1 and self._content[-2]["type"] == "text":
                self._content[-2]["text"] += self._content.pop()["text"]
        yield _event("content_block_stop", index=self._index)

    def finished(self, generation: Generation) -> dict[str, Any]:
        message = self._message(self._content, _stop_reason(self.last), self.last.stop)
        return message | {"usage": usage_fields(generation)}

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None
    ) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            # Not of this API.
            "seed": self._seed,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
        }

    def _delta(self, kind: str, **fields: str) -> bytes:
        delta = {"type": kind, **fields}
        return _event("content_block_delta", index=self._index, delta=delta)


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


def _stop_reason(answer: Delta) -> str:
    if answer.stop is not None and answer.finish_reason == "stop":
        return "stop_sequence"
    return _STOP_REASONS[answer.finish_reason or "stop"]


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
