"""Text to token ids and back, with the model's own tokenizer."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import FailFast, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.server.body import read_body
from mlx_mtp.server.conversation import Conversation
from mlx_mtp.server.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Message,
    Tool,
    WireModel,
    at_most,
    refusal,
)
from mlx_mtp.server.respond import context_of
from mlx_mtp.server.thinking import split_template_kwargs
from mlx_mtp.server.wire import MAX_PROMPT_IDS, Int, TemplateKwargs

Messages = Annotated[list[Message], FailFast(), at_most(MAX_MESSAGES)]
Tools = Annotated[list[Tool], FailFast(), at_most(MAX_TOOLS)]


class TokenizeRequest(WireModel):
    """POST /tokenize: a text, or a chat as its template writes it."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Messages = Field(default_factory=list)
    tools: Tools = Field(default_factory=list)
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_thing_is_given(self) -> TokenizeRequest:
        texts = [text for text in (self.prompt, self.content) if text is not None]
        if len(texts) + bool(self.messages) != 1:
            raise refusal(
                "give one of prompt (or content, as llama.cpp calls it) and messages",
                field="prompt",
            )
        if not self.messages and (self.tools or self.chat_template_kwargs):
            raise refusal("goes with messages", field="tools" if self.tools else None)
        return self

    @property
    def text(self) -> str | None:
        """The text, under either of its names."""
        return self.content if self.prompt is None else self.prompt

    def conversation(self) -> Conversation:
        """The chat, as the server knows it."""
        kwargs, _ = split_template_kwargs(self.chat_template_kwargs)
        return Conversation(
            messages=[message.message() for message in self.messages],
            tools=[tool.tool() for tool in self.tools],
            template_kwargs=kwargs,
        )


class DetokenizeRequest(WireModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Int], FailFast(), at_most(MAX_PROMPT_IDS)]


async def tokenize(request: Request) -> Response:
    """POST /tokenize, in vLLM's form, which llama.cpp's is a part of."""
    context = context_of(request)
    body = await read_body(request, TokenizeRequest, context.config.max_body_bytes)
    if body.model is not None:
        context.check_model(body.model)
    if body.text is None:
        ids = (await context.prompt(body.conversation())).token_ids
    else:
        encode = context.tokenizer.encode
        special = body.add_special_tokens
        ids = await asyncio.to_thread(encode, body.text, add_special_tokens=special)
    answer = {
        "count": len(ids),
        "max_model_len": context.engine.info.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [context.tokenizer.token_text(token) for token in ids]
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """POST /detokenize; the text goes by vLLM's name and by llama.cpp's."""
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest, context.config.max_body_bytes)
    if body.model is not None:
        context.check_model(body.model)
    ids = context.checked_ids(body.tokens, "tokens")
    raw = b"".join(map(context.tokenizer.token_bytes, ids))
    text = raw.decode(errors="replace")
    return JSONResponse({"prompt": text, "content": text})
