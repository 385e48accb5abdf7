"""From a conversation to the tokens that the model reads, on a thread beside the event loop."""

import asyncio
import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from mlx_mtp.errors import InvalidRequestError, UnsupportedParameterError
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.answer_grammar import answer_grammar
from mlx_mtp.server.conversation import Conversation, folded
from mlx_mtp.server.parsing.formats import QWEN3_CODER, OutputFormat
from mlx_mtp.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

First = TypeVar("First")
Result = TypeVar("Result")

LARGE_TEXT = 1 << 18
"""Of longer prompts, in characters, `LARGE_AT_ONCE` are encoded at once: each may take hundreds of
megabytes, and a core for seconds."""
LARGE_AT_ONCE = 1
_PAUSE, _TRIES = 0.05, 20  # between two interruptions of a template, and how many there are
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
    """Renders and encodes chats; the template may take so many `seconds`."""

    tokenizer: Tokenizer
    output_format: OutputFormat
    seconds: float
    as_standard: bool = False  # JSON schemas mean what their standard says, and no less
    request_templates: bool = False  # requests may bring their own
    _large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_AT_ONCE))

    async def prompt(
        self, conversation: Conversation, limit: int, *, with_grammar: bool = False
    ) -> Prompt:
        """The prompt, of at most `limit` tokens, up to where the answer begins."""

        def encode(text: str) -> Prompt:
            token_ids = self.tokenizer.encode(text, limit=limit, add_special_tokens=False)
            form, added = self.output_format, self.tokenizer.added_tokens
            thinking, spec = form.opens_thinking(text), None
            if with_grammar:
                style = self.as_standard
                spec = answer_grammar(
                    conversation, form, added, thinking=thinking, as_standard=style
                )
            return Prompt(token_ids, thinking, spec)

        async with self._turn(sum(len(message.content) for message in conversation.messages)):
            try:
                return await run_in_thread(lambda: self.render(conversation), encode, self.seconds)
            except TimeoutError:
                raise InvalidRequestError(
                    f"The model's chat template took more than {self.seconds:g} s on these "
                    "messages.",
                    param="messages",
                ) from None

    async def in_thread(self, size: int, work: Callable[[], Result]) -> Result:
        """Do some work on a text of so many characters off the event loop."""
        async with self._turn(size):
            return await asyncio.to_thread(work)

    def _turn(self, size: int) -> AbstractAsyncContextManager[None]:
        return self._large if size > LARGE_TEXT else contextlib.nullcontext()

    def render(self, conversation: Conversation) -> str:
        """The chat as the template writes it; RequestError: it lacks what is asked of it."""
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
        return self.tokenizer.render_chat(
            messages,
            tools,
            kwargs,
            template=template,
            generation_prompt=conversation.generation_prompt,
            continue_final=conversation.continue_final,
        )


class _TimeIsUp(BaseException):
    """Raised within the first part of a job; no `except Exception` there stops it."""


async def run_in_thread(
    first: Callable[[], First], rest: Callable[[First], Result], seconds: float
) -> Result:
    """`rest(first())` on another thread; `first` is Python code that may never end.

    When its `seconds` are up an exception is raised in it, at its next bytecode, and here a
    TimeoutError. A single call into C is not interrupted, but left behind.
    """
    job: Future[Result] = Future()
    lock = threading.Lock()
    in_first = True

    def work() -> None:
        nonlocal in_first
        # An interruption may come late: while the one before is dealt with.
        with contextlib.suppress(_TimeIsUp):
            if not job.set_running_or_notify_cancel():
                return
            try:
                try:
                    found = first()
                finally:
                    with lock:
                        in_first = False
                result = rest(found)
            except BaseException as raised:
                job.set_exception(TimeoutError() if isinstance(raised, _TimeIsUp) else raised)
            else:
                job.set_result(result)

    thread = threading.Thread(target=work, daemon=True, name="limited")
    thread.start()
    ended = asyncio.wrap_future(job)
    try:
        await asyncio.wait([ended], timeout=seconds)
        for _ in range(_TRIES):
            with lock:
                if job.cancel():
                    raise TimeoutError  # It would begin too late.
                has_time = ended.done() or not in_first
                if not has_time:
                    ident = ctypes.c_ulong(thread.ident or 0)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_TimeIsUp))
            if has_time:
                return await ended
            await asyncio.wait([ended], timeout=_PAUSE)
        logger.error("A thread does not end; it is abandoned.")
        raise TimeoutError
    finally:
        ended.cancel()
