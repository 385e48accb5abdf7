"""POST /tokenize and /detokenize."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.server.api import schema
from mlx_mtp.server.api.history import readable
from mlx_mtp.server.api.openai.protocol import OpenAIMessage, OpenAITool, TemplateFields
from mlx_mtp.server.generation.inputs import Conversation
from mlx_mtp.server.generation.job import chat_prompt
from mlx_mtp.server.generation.writer import packed_json, packed_slowly, respond_packed
from mlx_mtp.server.http.body import read_request
from mlx_mtp.server.http.record import client_of, record_of

_TOKEN_CHARACTERS = 8  # approximate characters of an answer per token


class TokenizeRequest(TemplateFields):
    """The body of /tokenize: a text, or a chat as its template writes it."""

    model: schema.ModelName = ""
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[schema.Many[OpenAIMessage], readable] = Field([])
    tools: schema.ManyTools[OpenAITool] = Field([])
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_thing_is_given(self) -> TokenizeRequest:
        texts = [text for text in (self.prompt, self.content) if text is not None]
        if len(texts) + bool(self.messages) != 1:
            raise schema.refusal(
                "give one of prompt (or content, as llama.cpp calls it) and messages",
                field="prompt",
            )
        of_chats = self.model_fields_set & {"tools", *TemplateFields.model_fields}
        if not self.messages and of_chats:
            raise schema.refusal("goes with messages", field=min(of_chats))
        return self

    def conversation(self) -> Conversation:
        return Conversation(
            messages=[message.message() for message in self.messages],
            tools=[tool.function.tool() for tool in self.tools],
            **self.template_fields(),
        ).with_template_kwargs(self.chat_template_kwargs)


def _ids_only(tokens: list[Any]) -> list[int]:
    # pydantic would hold the GIL while it checks a million tokens.
    for number, token in enumerate(tokens):
        if not schema.is_id(token):
            raise schema.refusal(f"entry {number} is not a token id")
    return tokens


class DetokenizeRequest(schema.WireModel):
    """The body of /detokenize."""

    model: schema.ModelName = ""
    tokens: Annotated[list[Any], schema.at_most(schema.MAX_PROMPT_IDS), AfterValidator(_ids_only)]


async def tokenize(request: Request) -> Response:
    """POST /tokenize, answered in vLLM's form, which includes llama.cpp's."""
    context, body = await read_request(request, TokenizeRequest)
    tokenizer = context.tokenizer
    prompter, scope = context.prompter, request.scope
    text = body.content if body.prompt is None else body.prompt

    limit, client = schema.MAX_PROMPT_IDS, client_of(scope)
    async with context.in_time(scope):
        if text is None:
            prompt = await chat_prompt(context, scope, body.conversation(), limit, client)
            ids = prompt.token_ids
        else:
            encode = partial(
                prompter.text.encode,
                text,
                param="content" if body.prompt is None else "prompt",
                limit=limit,
                add_special_tokens=body.add_special_tokens,
            )
            size = record_of(scope).body_bytes
            ids = await prompter.executor.run_by_size(size, client, encode)

    def content() -> str:
        fields = {
            "count": len(ids),
            "max_model_len": context.engine.info.max_model_len,
            "tokens": ids,
            "token_strs": list(map(tokenizer.token_text, ids)) if body.return_token_strs else None,
        }
        return packed_slowly(fields)

    return await respond_packed(request, _TOKEN_CHARACTERS * len(ids), content)


async def detokenize(request: Request) -> Response:
    """POST /detokenize, answered with the text in vLLM's field and in llama.cpp's."""
    context, body = await read_request(request, DetokenizeRequest)
    most = context.config.max_body_bytes

    def content() -> str:
        raw = bytearray()
        for token in context.checked_ids(body.tokens, "tokens"):
            raw += context.tokenizer.token_bytes(token)
            if len(raw) > most:
                message = f"The text is longer than {most} bytes (--max-body-size allows more)."
                raise InvalidRequestError(message, param="tokens")
        text = packed_json(raw.decode(errors="replace"))
        return f'{{"prompt":{text},"content":{text}}}'

    return await respond_packed(request, _TOKEN_CHARACTERS * len(body.tokens), content)
