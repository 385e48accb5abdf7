"""Ollama's routes, and the form of their answers."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.server.api.ollama.protocol import OllamaChat, OllamaShow, OllamaText
from mlx_mtp.server.api.openai.tokens import logprob_entries
from mlx_mtp.server.cards import EMBEDS, ollama_card, ollama_show
from mlx_mtp.server.context import Context, context_of
from mlx_mtp.server.generation.job import admit
from mlx_mtp.server.generation.writer import Block, BlockKind, Content, Writer, packed_json, respond
from mlx_mtp.server.http.body import read_request
from mlx_mtp.server.http.errors import ollama_error_body
from mlx_mtp.text.parsing.events import OutputToken

_FOREVER = datetime(9999, 1, 1, tzinfo=UTC).isoformat()


class _OllamaWriter(Writer):
    media_type = "application/x-ndjson"
    cut_calls_are_text = True
    prefixes: ClassVar[dict[BlockKind, str]] = {"call": "call_"}
    keep_alive = b" "  # begins the next line: clients take an empty line for an error

    @abstractmethod
    def text_fields(self, text: str, **more: Any) -> dict[str, Any]: ...

    def block_delta(self, block: Block, content: Content) -> list[bytes]:
        if block.kind == "text":
            return [self._line(content.text, tokens=getattr(content, "tokens", ()))]
        return [self._line("", thinking=content.text)] if block.kind == "reasoning" else []

    def block_stop(self, block: Block) -> list[bytes]:
        if block.kind == "call" and block.state == "complete":
            return [self._line("", tool_calls=[_call(block)])]
        is_cut = block.kind == "call" and block.state == "cut"
        return [self._line(block.raw or block.text)] if is_cut else []

    def ending(self) -> list[bytes]:
        return [_line_bytes(self._answer("") | self._costs())]

    def failure(self, error: Exception) -> list[bytes]:
        return [_line_bytes(ollama_error_body(error))]

    def whole(self) -> dict[str, Any]:
        text, thinking, calls, tokens = "", "", [], []
        for block in self.whole_blocks(0):
            tokens += block.tokens
            if block.kind == "reasoning":
                thinking += block.text
            elif block.kind == "call":
                calls.append(_call(block))
            else:
                text += block.text
        answer = self._answer(text, tokens, thinking=thinking, tool_calls=calls)
        return answer | self._costs()

    def _line(self, text: str, tokens: Sequence[OutputToken] = (), **more: Any) -> bytes:
        return _line_bytes(self._answer(text, tokens, **more) | {"done": False})

    def _answer(self, text: str, tokens: Sequence[OutputToken] = (), **more: Any) -> dict[str, Any]:
        given = {key: value for key, value in more.items() if value}
        fields = {"model": self.body.model, "created_at": _now(), **self.text_fields(text, **given)}
        if self.with_logprobs and tokens:
            fields["logprobs"] = logprob_entries(self.tokenizer, tokens)
        return fields

    def _costs(self) -> dict[str, Any]:
        times, generation = self.generation.timings(), self.generation
        prompt, answer = (int(times[f"{part}_ms"] * 1e6) for part in ("prompt", "predicted"))
        is_cut = generation.streams[0].finish_reason == "length"
        return {
            "done": True,
            "done_reason": "length" if is_cut else "stop",
            "total_duration": prompt + answer,
            "load_duration": 0,
            "prompt_eval_count": generation.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": generation.completion_tokens,
            "eval_duration": answer,
        }


class _OllamaChatWriter(_OllamaWriter):
    def text_fields(self, text: str, **more: Any) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, **more}}


class _OllamaTextWriter(_OllamaWriter):
    def text_fields(self, text: str, **more: Any) -> dict[str, Any]:
        return {"response": text, **more}


def _call(block: Block) -> dict[str, Any]:
    function = {"index": block.number, "name": block.name, "arguments": json.loads(block.text)}
    return {"id": block.id, "function": function}


def _line_bytes(line: dict[str, Any]) -> bytes:
    return packed_json(line).encode() + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat()


async def chat(request: Request) -> Response:
    """POST /api/chat."""
    job = await admit(request, OllamaChat, "ollama-")
    body = job.body
    if not body.messages:
        return _model_is_loaded(body.model, message={"role": "assistant", "content": ""})
    generation = await job.chat(body.conversation())
    return await respond(request, _OllamaChatWriter(job, generation))


async def generate(request: Request) -> Response:
    """POST /api/generate."""
    job = await admit(request, OllamaText, "ollama-")
    body = job.body
    if not body.prompt:
        return _model_is_loaded(body.model, response="")
    if body.raw:
        grammar = body.grammar()
        guided = None if grammar is None else ("format", grammar)
        generation = await job.complete([body.prompt], guided)
    else:
        generation = await job.chat(body.conversation())
    return await respond(request, _OllamaTextWriter(job, generation))


def _model_is_loaded(model: str, **answer: Any) -> Response:
    # Without a prompt Ollama loads the model. Here it is always loaded.
    fields = {"model": model, "created_at": _now(), **answer}
    return JSONResponse(fields | {"done": True, "done_reason": "load"})


async def tags(request: Request) -> Response:
    """GET /api/tags: the models."""
    return JSONResponse({"models": list(_cards(context_of(request)))})


async def processes(request: Request) -> Response:
    """GET /api/ps: the models that are loaded."""
    context = context_of(request)
    memory = context.engine.info.memory
    more = {"expires_at": _FOREVER, "size_vram": 0}
    more |= {"size": memory.get("weights", 0) + memory.get("head", 0)}
    more |= {"context_length": context.max_model_len}
    return JSONResponse({"models": [card | more for card in _cards(context)]})


async def show(request: Request) -> Response:
    """POST /api/show: what the model can do."""
    context, _ = await read_request(request, OllamaShow)
    form, kind = context.output_format, context.engine.info.model_type
    able = {"tools": form.tools, "thinking": form.reasoning}
    able["vision"] = "images" if context.engine.info.images else "none"
    names = ["completion", *(name for name in able if able[name] != "none")]
    names = EMBEDS if context.engine.info.embedding_size else names
    template = context.tokenizer.template
    shown = ollama_show(kind, context.max_model_len, context.created, names, template)
    return JSONResponse(shown)


def _cards(context: Context) -> Iterable[dict[str, Any]]:
    kind = context.engine.info.model_type
    for name in context.model_names:
        yield ollama_card(name, context.created, kind, context.config.model_bytes)
