"""The route that makes responses, and the form of its answers."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.api.openai.tokens import logprob_entries
from mlx_mtp.server.api.responses.protocol import ENCRYPTED, ResponsesRequest, items_of
from mlx_mtp.server.api.stored import Inputs, continued, keeper, size_of
from mlx_mtp.server.generation.generation import Generation
from mlx_mtp.server.generation.inputs import wrap
from mlx_mtp.server.generation.job import Job, admit
from mlx_mtp.server.generation.writer import Block, BlockKind, Content, Writer, event, respond
from mlx_mtp.server.http.errors import error_body
from mlx_mtp.text.parsing.events import OutputToken

_DONE, _CUT = "completed", "incomplete"
_STATUS = {"open": "in_progress", "complete": _DONE, "cut": _CUT}
_TYPES = {"text": "message", "reasoning": "reasoning", "call": "function_call"}


class _ResponseWriter(Writer):
    prefixes: ClassVar[dict[BlockKind, str]] = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}

    def __init__(self, job: Job[ResponsesRequest], generation: Generation) -> None:
        super().__init__(job, generation)
        self._echo = _echo(job.body, job.params)
        self._as_summary = job.body.reasoning.summary is not None
        self._with_encrypted = ENCRYPTED in job.body.include
        self._created = int(time.time())
        self._number = -1

    def whole(self) -> dict[str, Any]:
        # An unfinished character has tokens but no text, so its block is not listed as a message.
        return self._ended(b for b in self.whole_blocks(0) if b.kind != "text" or b.text)

    def _ended(self, blocks: Iterable[Block]) -> dict[str, Any]:
        is_cut = self.generation.streams[0].finish_reason == "length"
        fields = self._response(_CUT if is_cut else _DONE, blocks)
        if is_cut:
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = _usage(self.generation)
        return fields | {"usage": usage, "timings": self.generation.timings()}

    def _response(self, status: str, blocks: Iterable[Block]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == _DONE else None,
            "status": status,
            "output": [self._item(block) for block in blocks],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **self._echo,
        }

    def opening(self) -> list[bytes]:
        response = self._response("in_progress", [])
        return [self._event(kind, response=response) for kind in ("created", "in_progress")]

    def ending(self) -> list[bytes]:
        response = self._ended(self.blocks[0])
        return [self._event(response["status"], response=response)]

    def failure(self, error: Exception) -> list[bytes]:
        fields = error_body(error)["error"]
        reason = {"code": fields["code"] or "server_error", "message": fields["message"]}
        ended = [block for block in self.blocks[0] if block.state != "open"]
        return [self._event("failed", response=self._response("failed", ended) | {"error": reason})]

    def block_start(self, block: Block) -> list[bytes]:
        added = self._item_event("output_item.added", item=self._item(block))
        return [added, *self._part_events("added", block)]

    def block_delta(self, block: Block, content: Content) -> list[bytes]:
        name, fields = self._place(block)
        if block.kind == "text":
            fields["logprobs"] = self._logprobs(getattr(content, "tokens", ()))
        return [self._item_event(f"{name}.delta", item_id=block.id, delta=content.text, **fields)]

    def block_stop(self, block: Block) -> list[bytes]:
        name, fields = self._place(block)
        if block.kind == "call":
            fields |= {"name": block.name, "arguments": block.text}
        else:
            fields["text"] = block.text
        if block.kind == "text":
            fields["logprobs"] = self._logprobs(block.tokens)
        written = []
        if block.kind != "call" or block.state == "complete":
            written = [self._item_event(f"{name}.done", item_id=block.id, **fields)]
        written += self._part_events("done", block)
        return [*written, self._item_event("output_item.done", item=self._item(block))]

    def _place(self, block: Block) -> tuple[str, dict[str, Any]]:
        # Returns the name of a block's events, and where its text is within the item.
        if block.kind == "call":
            return "function_call_arguments", {}
        if block.kind == "reasoning" and self._as_summary:
            return "reasoning_summary_text", {"summary_index": 0}
        return "output_text" if block.kind == "text" else "reasoning_text", {"content_index": 0}

    def _part_events(self, change: str, block: Block) -> list[bytes]:
        if block.kind == "call" or (block.kind == "reasoning" and not self._as_summary):
            return []
        part = "content_part" if block.kind == "text" else "reasoning_summary_part"
        place = {"item_id": block.id, **self._place(block)[1]}
        return [self._item_event(f"{part}.{change}", **place, part=self._part(block))]

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, output_index=len(self.blocks[0]) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _item(self, block: Block) -> dict[str, Any]:
        status = _STATUS[block.state]
        item: dict[str, Any] = {"id": block.id, "type": _TYPES[block.kind], "status": status}
        if block.kind == "text":
            content = [] if block.state == "open" else [self._part(block)]
            return {**item, "role": "assistant", "content": content}
        if block.kind == "call":
            call_id = block.id.replace("fc_", "call_")
            return {**item, "call_id": call_id, "name": block.name, "arguments": block.text}
        item["summary"] = []
        if block.pieces:
            item["summary" if self._as_summary else "content"] = [self._part(block)]
        if self._with_encrypted:
            item["encrypted_content"] = wrap(block.text)
        return item

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            kind = "summary_text" if self._as_summary else "reasoning_text"
            return {"type": kind, "text": block.text}
        fields = {"type": "output_text", "text": block.text, "annotations": []}
        return {**fields, "logprobs": self._logprobs(block.tokens)}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> list[dict[str, Any]]:
        return logprob_entries(self.tokenizer, tokens) if self.with_logprobs else []


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, cached = generation.prompt_tokens, generation.cached_tokens
    output = generation.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": generation.reasoning_tokens},
        "total_tokens": prompt + output,
    }


_ECHOED = {
    *("model", "instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls"),
    *("tool_choice", "reasoning", "store", "previous_response_id"),
}


def _echo(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    dump = partial(body.model_dump, mode="json", by_alias=True)
    # Without nulls, which are the fields of other kinds of forms and tools.
    forms = dump(include={"text", "tools"}, exclude_none=True)
    return {
        **dump(include=_ECHOED),
        "text": {**forms["text"], "verbosity": "medium"},
        "tools": forms["tools"],
        "metadata": body.metadata or {},
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,  # not in OpenAI's API
        "top_logprobs": params.top_logprobs or 0,
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        # The only field that must not be null in OpenAI's schema.
        **({} if body.user is None else {"user": body.user}),
    }


async def responses(request: Request) -> Response:
    """POST /v1/responses."""
    job = await admit(request, ResponsesRequest, "resp_")
    body, name = job.body, job.answer_id
    earlier: Inputs = ()
    items: Sequence[Any] = ()
    if body.previous_response_id is not None:
        earlier = await continued(request, body.previous_response_id)
        read = partial(items_of, [packed for _, packed in earlier])
        parsing = job.context.limiter.parsing
        items = await parsing.run_by_size(size_of(earlier), job.options.engine.client, read)
    listed = partial(body.listed_input, name)
    keep = await keeper(request, body.store, body.metadata, listed, earlier)
    job = replace(job, body=body.model_copy(update={"store": keep is not None}))
    generation = await job.chat(body.conversation_after(items))
    return await respond(request, _ResponseWriter(job, generation), keep)
