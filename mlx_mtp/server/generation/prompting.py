"""From a conversation to the tokens that the model reads, on a thread beside the event loop."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from mlx_mtp.config import ServerConfig
from mlx_mtp.errors import (
    UNKNOWN_RETRY_SECONDS,
    InvalidRequestError,
    UnavailableError,
    UnsupportedParameterError,
    UsageError,
)
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.generation.conversation import Conversation, folded
from mlx_mtp.server.grammar.answer_grammar import answer_grammar
from mlx_mtp.server.http.fair_executor import FairExecutor
from mlx_mtp.text.parsing.formats import QWEN3_CODER, OutputFormat
from mlx_mtp.text.plain_text import marked
from mlx_mtp.text.sandbox.helper import HelperError, HelperUnavailableError
from mlx_mtp.text.sandbox.text_worker import MAX_ENCODE_SECONDS, NUM_WORKERS, TextWorkers
from mlx_mtp.text.tokenizer import Tokenizer

Result = TypeVar("Result")

LARGE_AT_ONCE = 1
"""Long prompts that are encoded at once: each may take hundreds of megabytes, and a core for
seconds."""
_THINKING = "enable_thinking"
_EFFORT = "reasoning_effort"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat as the model reads it."""

    token_ids: tuple[int, ...]
    thinking: bool  # it ends within a think block
    grammar: GrammarSpec | None = None  # of the answer; None leaves it free


@dataclass(frozen=True, slots=True)
class Prompter:
    """Renders and encodes chats; the template may take so many `seconds`.

    With `workers` their processes do it: a model's files are its author's, a template a client's.
    """

    tokenizer: Tokenizer
    output_format: OutputFormat
    seconds: float
    as_standard: bool = False  # JSON schemas mean what their standard says, and no less
    request_templates: bool = False  # requests may bring their own
    special_as_text: bool = False  # special tokens' names in a chat
    workers: TextWorkers | None = None
    _large: FairExecutor = field(default_factory=lambda: FairExecutor(LARGE_AT_ONCE))
    _working: FairExecutor = field(default_factory=lambda: FairExecutor(NUM_WORKERS))

    async def prompt(
        self,
        conversation: Conversation,
        limit: int,
        client: tuple[str, ...],
        *,
        with_grammar: bool = False,
    ) -> Prompt:
        """The prompt, of at most `limit` tokens, up to where the answer begins."""

        def work() -> Prompt:
            text, mark = self.render(conversation)
            token_ids = self.encode(
                text, "messages", limit=limit, add_special_tokens=False, mark=mark
            )
            thinking, spec = self.output_format.opens_thinking(text), None
            if with_grammar:
                spec = answer_grammar(
                    conversation,
                    self.output_format,
                    self.tokenizer.added_tokens,
                    thinking=thinking,
                    as_standard=self.as_standard,
                )
            return Prompt(token_ids, thinking, spec)

        return await self.in_turn(conversation.size, client, work)

    @property
    def fault(self) -> str | None:
        """Why no prompt can be made now."""
        return None if self.workers is None else self.workers.fault

    async def keep_running(self) -> None:
        """Start the workers again that could not be started, until the server ends."""
        if self.workers is not None:
            await self.workers.keep_running()

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()

    async def in_turn(
        self, size: int, client: tuple[str, ...], work: Callable[[], Result]
    ) -> Result:
        """Do some work on a text of so many characters off the event loop, in its client's turn."""
        if self.workers is None:
            return await self._large.run_by_size(size, client, work)
        return await self._working.run(client, work)

    def encode(self, text: str, param: str, **options: Any) -> tuple[int, ...]:
        """Token ids of a text, as `Tokenizer.encode` gives them; to be called in a turn."""
        if self.workers is None:
            return self.tokenizer.encode(text, **options)
        return tuple(self._ask(param, "encode", MAX_ENCODE_SECONDS, text, **options))

    def _ask(self, param: str, name: str, seconds: float, *args: Any, **more: Any) -> Any:
        assert self.workers is not None
        what = "tokenizer" if name == "encode" else "chat template"
        try:
            return self.workers.call(name, seconds, *args, **more)
        except HelperUnavailableError as error:
            message = f"The model's {what} can't be used now: {error}."
            raise UnavailableError(message, retry_after=UNKNOWN_RETRY_SECONDS) from None
        except TimeoutError:
            fault = f"took more than {seconds:g} s on this"
        except HelperError:
            fault = "took too much memory on this, or broke"
        raise InvalidRequestError(f"The model's {what} {fault}.", param=param)

    def render(self, conversation: Conversation) -> tuple[str, str | None]:
        """The chat as the template writes it, and the mark of `plain_text.marked` in it, if any.

        Raises RequestError if the template lacks what is asked of it.
        """
        # Templates of that format write each argument as a tag of its own.
        as_object = self.output_format.tools == QWEN3_CODER
        chat = folded(conversation.messages)
        messages = [message.for_template(as_object=as_object) for message in chat]
        tools = [tool.for_template() for tool in conversation.offered_tools]
        template = conversation.template
        if template is not None and not self.request_templates:
            raise UnsupportedParameterError(
                "This server takes no chat templates of requests (--request-chat-template).",
                param="chat_template",
            )
        knows = partial(self.tokenizer.template_knows, template=template)
        if tools and not knows("tools"):
            raise UnsupportedParameterError(
                "This model's chat template does not support tools.", param="tools"
            )
        kwargs = dict(conversation.template_kwargs)
        if kwargs.get(_THINKING) is False and not knows(_THINKING):
            del kwargs[_THINKING]  # A model that never thinks needs no flag.
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
        if conversation.continue_final and not (chat and chat[-1].role == "assistant"):
            raise InvalidRequestError(
                "continue_final_message needs a last message of role assistant.",
                param="continue_final_message",
            )
        chat_of = {"messages": messages, "tools": tools, "template_kwargs": kwargs}
        mark = None
        if self.special_as_text:
            chat_of, mark = marked(chat_of, self.tokenizer.added_tokens)
        render: Callable[..., str] = self.tokenizer.render_chat
        if self.workers is not None:
            render = partial(self._ask, "messages", "render_chat", self.seconds)
        text = render(
            **chat_of,
            template=template,
            generation_prompt=conversation.generation_prompt,
            continue_final=conversation.continue_final,
        )
        return text, mark


def make_prompter(tokenizer: Tokenizer, config: ServerConfig) -> Prompter:
    """The prompter of a server with these settings."""
    parsers, path = (config.reasoning_parser, config.tool_call_parser), config.text_workers
    special_as_text = config.special_tokens_in_messages == "text"
    if special_as_text and (names := tokenizer.hidden_names):
        raise UsageError(
            "--special-tokens-in-messages text can't be kept with this model's tokenizer: it may "
            f"make {len(names)} of its tokens of other texts than their names, such as "
            f"{names[0]!r}."
        )
    return Prompter(
        tokenizer,
        OutputFormat.choose(tokenizer.template, *parsers),
        config.template_seconds,
        as_standard=config.json_schemas == "standard",
        request_templates=config.request_chat_template,
        special_as_text=special_as_text,
        workers=None if path is None else TextWorkers(path),
    )
