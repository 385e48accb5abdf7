"""Turns conversations into the tokens that the model reads, on threads beside the event loop."""

import logging
from functools import cache
from typing import Any, NamedTuple

from mlx_mtp.config import ServerConfig
from mlx_mtp.errors import InvalidRequestError, UnsupportedParameterError, UsageError
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.generation.inputs import BUDGET, EFFORT, EFFORTS, Conversation, Message, folded
from mlx_mtp.server.generation.pictures import Images as Images
from mlx_mtp.server.generation.pictures import ImageSizes, Sight
from mlx_mtp.server.grammar.answer_grammar import answer_grammar
from mlx_mtp.server.http.admission import FairExecutor
from mlx_mtp.text.parsing.formats import QWEN3, QWEN3_CODER, OutputFormat
from mlx_mtp.text.parsing.tags import OPEN
from mlx_mtp.text.plain_text import marked
from mlx_mtp.text.sandbox.text_worker import NUM_WORKERS, TextWorkers
from mlx_mtp.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LARGE_AT_ONCE = 1
"""Maximum number of long prompts that are encoded at the same time: each can take hundreds of
megabytes of memory, and a core for seconds."""


class ChatPrompt(NamedTuple):
    """A chat as the model reads it."""

    token_ids: tuple[int, ...]
    thinking: bool  # the prompt ends within a think block
    grammar: GrammarSpec | None  # of the answer; None: any text
    ignored: tuple[str, ...]  # the client's fields that the template doesn't read
    images: Images = None


class Prompter:
    """Renders and encodes chats with `text`: the tokenizer itself, or processes that run it.

    Raises UsageError if the tokenizer doesn't allow the settings.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: ServerConfig, images: ImageSizes | None = None
    ) -> None:
        self.tokenizer = tokenizer
        parsers = config.reasoning_parser, config.tool_call_parser
        self.output_format = OutputFormat.of_template(tokenizer.template, *parsers)
        # A model's files run its author's code, and a request's template runs the client's: both
        # get processes of their own.
        self.workers: TextWorkers | None = None
        self.executor = FairExecutor(LARGE_AT_ONCE)
        if config.text_workers is not None:
            self.workers = TextWorkers(
                config.text_workers, config.template_seconds, config.chat_template
            )
            self.executor = FairExecutor(NUM_WORKERS, small=-1)
        self.text = self.workers or tokenizer
        self._sight = Sight(images, config.max_images, self.workers)
        self._as_standard = config.json_schemas == "standard"
        self._request_templates = config.request_chat_template
        self._is_strict = config.unknown_parameters == "error"
        self._kwargs = config.chat_template_kwargs or {}
        self._takes = cache(self._takes_effort)
        self._special_as_text = config.special_tokens_in_messages == "text"
        # A client's text must not turn into the tokens that stand for images.
        self._image_names = self._sight.names(tokenizer.added_tokens)
        if self._special_as_text and (names := tokenizer.hidden_names):
            raise UsageError(
                "--special-tokens-in-messages text can't be kept with this model's tokenizer: it "
                f"may make {len(names)} of its tokens of other texts than their names, such as "
                f"{names[0]!r}."
            )
        try:
            Conversation(()).with_template_kwargs(self._kwargs)
        except InvalidRequestError as error:
            raise UsageError(f"--chat-template-kwargs: {error}") from None
        for key in self._kwargs:
            if key in tokenizer.closed_kwargs:
                raise UsageError(f"--chat-template-kwargs may not set {key}.")
            if key != BUDGET and key not in self.text.variables():
                logger.warning("The chat template has no %s (--chat-template-kwargs).", key)

    def prompt(
        self, conversation: Conversation, limit: int, *, with_grammar: bool = False
    ) -> ChatPrompt:
        """Returns the prompt up to where the answer begins, and the grammar if `with_grammar`.

        Raises RequestError for a chat that can't be rendered or has more than `limit` tokens.
        """
        found = self._sight.find(message.content for message in conversation.messages)
        asked = conversation
        if self._kwargs:
            conversation = conversation.with_defaults(self._kwargs)
        text, mark = self.render(conversation)
        ignored = self._ignored(asked) if asked.template_kwargs else ()
        token_ids = self.text.encode(
            text, param="messages", limit=limit, add_special_tokens=False, mark=mark
        )
        images = None
        if found:
            token_ids, images = self._sight.place(found, token_ids, limit)
        # If the prompt ends within a think block, the answer begins in that block.
        thinking = self.output_format.reasoning == QWEN3 and text.rstrip().endswith(OPEN)
        spec = None
        is_free = conversation.response is None and conversation.thinking_budget is None
        if with_grammar and (conversation.tools or not is_free):
            spec = answer_grammar(
                conversation,
                self.output_format,
                self.tokenizer.added_tokens,
                thinking=thinking,
                as_standard=self._as_standard,
            )
        return ChatPrompt(token_ids, thinking, spec, ignored, images)

    def render(self, conversation: Conversation) -> tuple[str, str | None]:
        """Returns the chat as the template writes it, and the mark of `plain_text.marked`, if any.

        Raises RequestError if the template does not support what the request needs.
        """
        # Templates of this format write each argument as a tag, so they need an object.
        as_object = self.output_format.tools == QWEN3_CODER
        chat = folded(conversation.messages)
        messages = [message.for_template(as_object=as_object) for message in chat]
        tools = [tool.for_template() for tool in conversation.offered_tools]
        template = conversation.template
        if template is not None and not self._request_templates:
            raise UnsupportedParameterError(
                "This server takes no chat templates of requests (--request-chat-template).",
                param="chat_template",
            )
        kwargs = conversation.variables
        known = self.text.variables(template) if tools or kwargs else frozenset()
        if tools and "tools" not in known:
            raise UnsupportedParameterError(
                "This model's chat template does not support tools.", param="tools"
            )
        # Closed variables stay in, so that `render_chat` refuses them.
        closed = self.tokenizer.closed_kwargs if kwargs else frozenset()
        kwargs = {key: value for key, value in kwargs.items() if key in known | closed}
        if template is None and kwargs.get(EFFORT) in EFFORTS:
            self._fit_effort(kwargs)
        if conversation.continue_final and not (chat and chat[-1].role == "assistant"):
            raise InvalidRequestError(
                "continue_final_message needs a last message of role assistant.",
                param="continue_final_message",
            )
        chat_of: dict[str, Any] = {"messages": messages, "tools": tools, "template_kwargs": kwargs}
        mark = None
        names = self.tokenizer.added_tokens if self._special_as_text else self._image_names
        if names:
            chat_of, mark = marked(chat_of, names)
        text = self.text.render_chat(
            **chat_of,
            template=template,
            generation_prompt=conversation.generation_prompt,
            continue_final=conversation.continue_final,
        )
        return text, mark

    def _ignored(self, conversation: Conversation) -> tuple[str, ...]:
        """Returns the names of the client's `template_kwargs` that the template doesn't read.

        Raises UnsupportedParameterError for them if unknown parameters are refused.
        """
        known = self.text.variables(conversation.template) | self.tokenizer.closed_kwargs
        unread = [key for key in conversation.template_kwargs if key not in known]
        names = tuple(f"chat_template_kwargs.{key}" for key in unread)
        if names and self._is_strict:
            raise UnsupportedParameterError(
                f"This model's chat template has no {unread[0]}.", param=names[0]
            )
        return names

    def _fit_effort(self, kwargs: dict[str, Any]) -> None:
        """Replace the effort by the nearest one that the template takes: some raise for others."""
        at = EFFORTS.index(kwargs[EFFORT])
        near = sorted(EFFORTS, key=lambda effort: abs(EFFORTS.index(effort) - at))
        kwargs[EFFORT] = next(filter(self._takes, near), kwargs[EFFORT])

    def _takes_effort(self, effort: str) -> bool:
        chat = [Message("user", "-").for_template()]
        try:
            self.text.render_chat(chat, template_kwargs={EFFORT: effort})
        except InvalidRequestError:
            return False
        return True
