"""Anthropic's routes, for any `anthropic-version`, and the form of their answers."""

import json
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.server.api.anthropic.protocol import CountRequest, MessagesRequest
from mlx_mtp.server.api.schema import MAX_PROMPT_IDS
from mlx_mtp.server.generation.generation import Generation
from mlx_mtp.server.generation.inputs import wrap
from mlx_mtp.server.generation.job import admit, chat_prompt
from mlx_mtp.server.generation.writer import Block, BlockKind, Content, Writer, event, respond
from mlx_mtp.server.http.body import read_request
from mlx_mtp.server.http.errors import anthropic_error_body
from mlx_mtp.server.http.record import client_of

# Clients send thinking blocks back only if they have a signature, whatever it is.
_SIGNATURE = "mlx-mtp"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _MessageWriter(Writer):
    keep_alive = event({"type": "ping"}, "ping")
    prefixes: ClassVar[dict[BlockKind, str]] = {"call": "toolu_"}
    # A cut call, completed to an object, would look complete, and a client might write half a
    # file. In a stream the JSON of its input is left unfinished.
    cut_calls_are_text = True
    body: MessagesRequest

    def opening(self) -> list[bytes]:
        nothing = {"stop_reason": None, "stop_sequence": None}
        return [_event("message_start", message=self._message([], nothing))]

    def ending(self) -> list[bytes]:
        delta, usage = self._stop_reason(), _usage(self.generation)
        last = _event("message_delta", delta=delta, usage=usage, seed=self.params.seed)
        return [last, _event("message_stop")]

    def failure(self, error: Exception) -> list[bytes]:
        return [event(anthropic_error_body(error), "error")]

    def block_start(self, block: Block) -> list[bytes]:
        return [self._block_event("start", content_block=self._content(block))]

    def block_delta(self, block: Block, content: Content) -> list[bytes]:
        if block.kind == "text":
            return [self._delta("text_delta", text=content.text)]
        if block.kind == "call":
            return [self._delta("input_json_delta", partial_json=content.text)]
        if self.body.thinking.display == "omitted":
            return []
        return [self._delta("thinking_delta", thinking=content.text)]

    def block_stop(self, block: Block) -> list[bytes]:
        end = [self._block_event("stop")]
        if block.kind != "reasoning":
            return end
        return [self._delta("signature_delta", signature=self._content(block)["signature"]), *end]

    def whole(self) -> dict[str, Any]:
        return self._message(list(map(self._content, self.whole_blocks(0))), self._stop_reason())

    def _content(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            shown, signature = block.text, _SIGNATURE
            if self.body.thinking.display == "omitted":
                shown, signature = "", wrap(shown)
            signature = "" if block.state == "open" else signature
            return {"type": "thinking", "thinking": shown, "signature": signature}
        if block.kind == "call":
            given = json.loads(block.text) if block.state == "complete" else {}
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}
        return {"type": "text", "text": block.text}

    def _message(self, content: list[dict[str, Any]], reason: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "seed": self.params.seed,  # not in Anthropic's API
            "content": content,
            **reason,
            "usage": _usage(self.generation),
        }

    def _stop_reason(self) -> dict[str, Any]:
        (stream,) = self.generation.streams
        reason = _STOP_REASONS[stream.finish_reason or "stop"]
        if stream.stop_text is not None and stream.finish_reason == "stop":
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stream.stop_text}

    def _delta(self, kind: str, **fields: str) -> bytes:
        return self._block_event("delta", delta={"type": kind, **fields})

    def _block_event(self, kind: str, **fields: Any) -> bytes:
        return _event(f"content_block_{kind}", index=len(self.blocks[0]) - 1, **fields)


def _usage(generation: Generation) -> dict[str, Any]:
    cached = generation.cached_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generation.completion_tokens,
        "output_tokens_details": {"thinking_tokens": generation.reasoning_tokens},
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    job = await admit(request, MessagesRequest, "msg_")
    generation = await job.chat(job.body.conversation())
    return await respond(request, _MessageWriter(job, generation))


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    context, body = await read_request(request, CountRequest)
    scope = request.scope
    async with context.in_time(scope):
        prompt = await chat_prompt(
            context, scope, body.conversation(), MAX_PROMPT_IDS, client_of(scope)
        )
    return JSONResponse({"input_tokens": len(prompt.token_ids)})
