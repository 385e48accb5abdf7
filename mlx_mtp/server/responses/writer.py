"""A response: as a whole, and as the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.http_errors import error_body
from mlx_mtp.server.openai.writer import logprob_entries
from mlx_mtp.server.parsing.events import OutputToken
from mlx_mtp.server.responses.wire import ENCRYPTED, ResponsesRequest
from mlx_mtp.server.text import wrap
from mlx_mtp.server.tokenizer import Tokenizer
from mlx_mtp.server.writer import Block, BlockWriter, Content, event, new_id

_DONE, _CUT = "completed", "incomplete"
_ITEMS = {
    "text": ("msg", "message"),
    "reasoning": ("rs", "reasoning"),
    "call": ("fc", "function_call"),
}


class ResponseWriter(BlockWriter):
    """/v1/responses.

    Args:
        body: the request, much of which comes back with the response.
        params: how it is sampled.
        model: its name.
        tokenizer: names tokens, for logprobs.
    """

    def __init__(
        self, body: ResponsesRequest, params: SamplingParams, model: str, tokenizer: Tokenizer
    ) -> None:
        super().__init__(new_id("resp"))
        self._echo = _echo(body, params)
        self._model = model
        self._tokenizer = tokenizer
        self._with_logprobs = params.top_logprobs is not None
        self._as_summary = body.reasoning.summary is not None
        self._with_encrypted = ENCRYPTED in body.include
        self._created = int(time.time())
        self._number = -1
        self._output: list[dict[str, Any]] = []
        self._ids = ("", "")

    # As a whole.

    def finished(self, generation: Generation) -> dict[str, Any]:
        output = [item for item in self._output if _has_text(item)]
        return self._ended(output, generation)

    def _ended(self, output: list[dict[str, Any]], generation: Generation) -> dict[str, Any]:
        is_cut = self.last.finish_reason == "length"
        fields = self._response(_CUT if is_cut else _DONE, output)
        if is_cut:
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return fields | {"usage": usage_fields(generation), "timings": generation.timings()}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == _DONE else None,
            "status": status,
            "model": self._model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **self._echo,
        }

    # As a stream.

    def opening(self, generation: Generation) -> Iterable[bytes]:
        response = self._response("in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def ending(self, generation: Generation) -> Iterable[bytes]:
        response = self._ended(self._output, generation)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: Exception) -> Iterable[bytes]:
        fields = error_body(error)["error"]
        reason = {"code": fields["code"] or "server_error", "message": fields["message"]}
        response = self._response("failed", self._output) | {"error": reason}
        yield self._event("response.failed", response=response)

    def start(self, block: Block) -> Iterable[bytes]:
        self._ids = (new_id(_ITEMS[block.kind][0]), new_id("call"))
        yield self._item_event("output_item.added", item=self._item(block))
        if block.kind == "text":
            yield self._part_event("content_part.added", self._text(block), content_index=0)
        elif block.kind == "reasoning" and self._as_summary:
            part = self._thought(block)
            yield self._part_event("reasoning_summary_part.added", part, summary_index=0)

    def add(self, block: Block, content: Content) -> Iterable[bytes]:
        name, fields = self._place(block)
        if block.kind == "text":
            fields["logprobs"] = self._logprobs(getattr(content, "tokens", ()))
        yield self._item_event(f"{name}.delta", item_id=self._ids[0], delta=content.text, **fields)

    def stop(self, block: Block) -> Iterable[bytes]:
        name, fields = self._place(block)
        where = {"item_id": self._ids[0]}
        if block.kind == "text":
            logprobs = self._logprobs(block.tokens)
            more = {**fields, "text": block.text, "logprobs": logprobs}
            yield self._item_event(f"{name}.done", **where, **more)
            yield self._part_event("content_part.done", self._text(block), **fields)
        elif block.kind == "reasoning":
            yield self._item_event(f"{name}.done", **where, **fields, text=block.text)
            if self._as_summary:
                part = self._thought(block)
                yield self._part_event("reasoning_summary_part.done", part, **fields)
        elif block.state == "complete":
            arguments = {"name": block.name, "arguments": block.text}
            yield self._item_event(f"{name}.done", **where, **arguments)
        item = self._item(block)
        yield self._item_event("output_item.done", item=item)
        self._output.append(item)

    def _place(self, block: Block) -> tuple[str, dict[str, Any]]:
        """The name of a block's events, and the fields that say where its text is in the item."""
        if block.kind == "text":
            return "output_text", {"content_index": 0}
        if block.kind == "call":
            return "function_call_arguments", {}
        if self._as_summary:
            return "reasoning_summary_text", {"summary_index": 0}
        return "reasoning_text", {"content_index": 0}

    def _part_event(self, kind: str, part: dict[str, Any], **index: int) -> bytes:
        return self._item_event(kind, item_id=self._ids[0], **index, part=part)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(f"response.{kind}", output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    # Output items, of which each is made of one block.

    def _item(self, block: Block) -> dict[str, Any]:
        item_id, call_id = self._ids
        item: dict[str, Any] = {"id": item_id, "type": _ITEMS[block.kind][1]}
        is_open = block.state == "open"
        status = "in_progress" if is_open else _DONE if block.state == "complete" else _CUT
        if block.kind == "text":
            content = [] if is_open else [self._text(block)]
            return {**item, "role": "assistant", "status": status, "content": content}
        item["status"] = status
        if block.kind == "call":
            return {**item, "call_id": call_id, "name": block.name, "arguments": block.text}
        item["summary"] = []
        if block.pieces:
            item["summary" if self._as_summary else "content"] = [self._thought(block)]
        if self._with_encrypted:
            item["encrypted_content"] = wrap(block.text)
        return item

    def _text(self, block: Block) -> dict[str, Any]:
        fields = {"type": "output_text", "text": block.text, "annotations": []}
        return {**fields, "logprobs": self._logprobs(block.tokens)}

    def _thought(self, block: Block) -> dict[str, Any]:
        return {
            "type": "summary_text" if self._as_summary else "reasoning_text",
            "text": block.text,
        }

    def _logprobs(self, tokens: Sequence[OutputToken]) -> list[dict[str, Any]]:
        return logprob_entries(self._tokenizer, tokens) if self._with_logprobs else []


def _has_text(item: dict[str, Any]) -> bool:
    """Half a character of text has tokens, but is no message of a whole answer."""
    return item["type"] != "message" or bool(item["content"][0]["text"])


def usage_fields(generation: Generation) -> dict[str, Any]:
    """The counts in the form of responses."""
    usage = generation.usage()
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _echo(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """What of the request comes back with the response."""
    asked = body.model_dump(mode="json", by_alias=True)
    # What is absent is left out here, not null: forms and tools of other kinds have such fields.
    forms = body.model_dump(
        mode="json", by_alias=True, exclude_none=True, include={"text", "tools"}
    )
    same = ("instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls")
    return {
        **{name: asked[name] for name in same},
        "tool_choice": asked["tool_choice"],
        **forms,
        "reasoning": asked["reasoning"],
        "metadata": asked["metadata"] or {},
        "temperature": params.temperature,
        "top_p": params.top_p,
        # Not of this API: the seed that was given, or chosen, to ask for the same again.
        "seed": params.seed,
        "top_logprobs": params.top_logprobs or 0,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        # The one field that has no null in OpenAI's description.
        **({} if body.user is None else {"user": body.user}),
    }
