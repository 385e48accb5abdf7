"""From a conversation to the tokens that the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_mtp.errors import InvalidRequestError, UnsupportedParameterError
from mlx_mtp.server.conversation import Conversation, folded
from mlx_mtp.server.parsing.formats import QWEN3_CODER, OutputFormat
from mlx_mtp.server.run_limited import run_limited
from mlx_mtp.server.tokenizer import Tokenizer

_THINKING = "enable_thinking"
_EFFORT = "reasoning_effort"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat as the model reads it.

    Args:
        token_ids: of all of it.
        thinking: it ends within a think block.
    """

    token_ids: tuple[int, ...]
    thinking: bool


@dataclass(frozen=True, slots=True)
class Prompter:
    """Renders and encodes chats. Slow for long ones: call it off the event loop.

    Args:
        tokenizer: with its template.
        output_format: of the model's answers.
        seconds: most time that the template may take.
    """

    tokenizer: Tokenizer
    output_format: OutputFormat
    seconds: float

    def prompt(self, conversation: Conversation, limit: int | None = None) -> Prompt:
        """The prompt, up to where the answer begins.

        Raises:
            MlxMtpError: the template can't take this chat, or it is longer than `limit` tokens.
        """
        text = self.render(conversation)
        ids = self.tokenizer.encode_rendered(text, limit=limit)
        return Prompt(ids, self.output_format.opens_thinking(text))

    def render(self, conversation: Conversation) -> str:
        """The chat as the template writes it.

        Raises:
            MlxMtpError: the template refuses it, takes too long, or lacks what is asked of it.
        """
        # Templates of that format write each argument as a tag of its own.
        as_object = self.output_format.tools == QWEN3_CODER
        messages = [
            message.for_template(as_object=as_object) for message in folded(conversation.messages)
        ]
        tools = [tool.for_template() for tool in conversation.offered_tools]
        if tools and not self.tokenizer.template_knows("tools"):
            raise UnsupportedParameterError(
                "This model's chat template does not support tools.", param="tools"
            )
        kwargs = self._template_kwargs(conversation)
        try:
            return run_limited(
                lambda: self.tokenizer.render_chat(
                    messages, tools, kwargs, continue_final=conversation.continue_final
                ),
                self.seconds,
            )
        except TimeoutError:
            raise InvalidRequestError(
                f"The model's chat template took more than {self.seconds:g} s on these messages.",
                param="messages",
            ) from None

    def _template_kwargs(self, conversation: Conversation) -> Mapping[str, Any]:
        knows = self.tokenizer.template_knows
        kwargs = dict(conversation.template_kwargs)
        if kwargs.get(_THINKING) is False and not knows(_THINKING):
            del kwargs[_THINKING]  # A model that never thinks needs not be told.
        for key in kwargs:
            # `render_chat` refuses the closed ones, whether the template knows them or not.
            if not knows(key) and key not in self.tokenizer.closed_kwargs:
                raise UnsupportedParameterError(
                    f"This model's chat template has no {key}.",
                    param=f"chat_template_kwargs.{key}",
                )
        wanted = {_THINKING: conversation.thinking, _EFFORT: conversation.effort}
        for key, value in wanted.items():
            if value is not None and knows(key):
                kwargs.setdefault(key, value)
        return kwargs
