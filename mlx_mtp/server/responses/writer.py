"""A response: as a whole, and as the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.choice import Content, Delta, Piece, TokenInfo
from mlx_mtp.server.generation import Generation
from mlx_mtp.server.http_errors import error_body
from mlx_mtp.server.parsing.events import Reasoning, ToolArguments, ToolCut, ToolStart
from mlx_mtp.server.responses.output_items import Items
from mlx_mtp.server.responses.wire import ResponsesRequest
from mlx_mtp.server.whole import Answer, CallPart, TextPart
from mlx_mtp.server.writer import COMMENT, event, new_id

_DONE, _CUT = "completed", "incomplete"


@dataclass(slots=True)
class _OpenItem:
    """The output item that the stream is writing."""

    kind: str
    id: str
    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    call_id: str = ""
    name: str = ""


class ResponseWriter:
    """/v1/responses.

    Args:
        body: the request, much of which comes back with the response.
        params: how it is sampled.
        model: its name.
        items: makes output items.
    """

    keep_alive = COMMENT
    done = b""

    def __init__(
        self, body: ResponsesRequest, params: SamplingParams, model: str, items: Items
    ) -> None:
        self.response_id = new_id("resp")
        self._echo = _echo(body, params)
        self._model = model
        self._items = items
        self._created = int(time.time())
        self._number = -1
        self._output: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._reason = "stop"

    # As a whole.

    def whole(self, answers: Sequence[Answer], generation: Generation) -> dict[str, Any]:
        """The response."""
        (answer,) = answers
        parts = [p for p in answer.parts if not isinstance(p, TextPart) or p.text]
        statuses = [_CUT if isinstance(p, CallPart) and p.cut is not None else _DONE for p in parts]
        if answer.finish_reason == "length" and parts and not isinstance(parts[-1], CallPart):
            statuses[-1] = _CUT
        output = [self._items.of(part, status) for part, status in zip(parts, statuses)]
        return self._ended(output, answer.finish_reason or "stop", generation)

    def _ended(
        self, output: list[dict[str, Any]], reason: str, generation: Generation
    ) -> dict[str, Any]:
        fields = self._response(_CUT if reason == "length" else _DONE, output)
        if reason == "length":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return fields | {"usage": usage_fields(generation), "timings": generation.timings()}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id,
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
        """The response without its output."""
        response = self._response("in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def delta(self, delta: Delta, generation: Generation) -> Iterable[bytes]:
        """Each piece goes into the item that is open, or opens one of its kind."""
        for piece in delta.pieces:
            yield from self._piece(piece)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason

    def ending(self, generation: Generation) -> Iterable[bytes]:
        """The response as a whole."""
        yield from self._close(_CUT if self._reason == "length" else _DONE)
        response = self._ended(self._output, self._reason, generation)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: Exception) -> Iterable[bytes]:
        """The response, failed."""
        fields = error_body(error)["error"]
        told = {"code": fields["code"] or "server_error", "message": fields["message"]}
        response = self._response("failed", self._output) | {"error": told}
        yield self._event("response.failed", response=response)

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Content):
            if piece.broken_call is not None:
                yield from self._close(_CUT)
            if piece.text or piece.tokens:
                yield from self._text(piece)
        elif isinstance(piece, Reasoning):
            yield from self._thought(piece.text)
        elif isinstance(piece, ToolStart):
            yield from self._close()
            item = _OpenItem("call", new_id("fc"), call_id=new_id("call"), name=piece.name)
            self._open = item
            yield self._added(self._item(item, "in_progress"))
        elif isinstance(piece, ToolArguments):
            yield self._delta("response.function_call_arguments.delta", piece.text)
        else:
            yield from self._close(_CUT if isinstance(piece, ToolCut) else _DONE)

    def _text(self, piece: Content) -> Iterator[bytes]:
        if self._open is None or self._open.kind != "text":
            yield from self._close()
            self._open = _OpenItem("text", new_id("msg"))
            yield self._added(self._items.message(self._open.id, "in_progress", []))
            yield self._part_event("response.content_part.added", self._items.text("", ()))
        self._open.tokens.extend(piece.tokens)
        logprobs = self._items.logprobs(piece.tokens)
        name = "response.output_text.delta"
        yield self._delta(name, piece.text, content_index=0, logprobs=logprobs)

    def _thought(self, text: str) -> Iterator[bytes]:
        if self._open is None or self._open.kind != "thought":
            yield from self._close()
            self._open = _OpenItem("thought", new_id("rs"))
            yield self._added(self._items.reasoning(self._open.id, "in_progress", ""))
            if self._items.as_summary:
                part = self._items.thought("")
                yield self._part_event("response.reasoning_summary_part.added", part)
        yield self._delta(f"{self._thought_event}.delta", text, **self._thought_index)

    @property
    def _thought_event(self) -> str:
        kind = "summary_text" if self._items.as_summary else "text"
        return f"response.reasoning_{kind}"

    @property
    def _thought_index(self) -> dict[str, int]:
        return {"summary_index" if self._items.as_summary else "content_index": 0}

    def _close(self, status: str = _DONE) -> Iterator[bytes]:
        item = self._open
        if item is None:
            return
        where = {"item_id": item.id}
        if item.kind == "text":
            logprobs = self._items.logprobs(item.tokens)
            more = {"content_index": 0, "text": item.text, "logprobs": logprobs}
            yield self._item_event("response.output_text.done", **where, **more)
            part = self._items.text(item.text, item.tokens)
            yield self._part_event("response.content_part.done", part)
        elif item.kind == "thought":
            done = f"{self._thought_event}.done"
            yield self._item_event(done, **where, **self._thought_index, text=item.text)
            if self._items.as_summary:
                part = self._items.thought(item.text)
                yield self._part_event("response.reasoning_summary_part.done", part)
        elif status == _DONE:
            done = "response.function_call_arguments.done"
            yield self._item_event(done, **where, name=item.name, arguments=item.text)
        whole = self._item(item, status)
        yield self._item_event("response.output_item.done", item=whole)
        self._output.append(whole)
        self._open = None

    def _item(self, item: _OpenItem, status: str) -> dict[str, Any]:
        if item.kind == "text":
            text = self._items.text(item.text, item.tokens)
            return self._items.message(item.id, status, [text])
        if item.kind == "thought":
            return self._items.reasoning(item.id, status, item.text)
        return self._items.call(item.id, status, item.call_id, item.name, item.text)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._item_event("response.output_item.added", item=item)

    def _part_event(self, name: str, part: dict[str, Any]) -> bytes:
        assert self._open is not None, "a part belongs to an item"
        index = self._thought_index if self._open.kind == "thought" else {"content_index": 0}
        return self._item_event(name, item_id=self._open.id, **index, part=part)

    def _delta(self, name: str, text: str, **more: Any) -> bytes:
        assert self._open is not None, "a delta belongs to an item"
        self._open.text += text
        return self._item_event(name, item_id=self._open.id, delta=text, **more)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)


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
