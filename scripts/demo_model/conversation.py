"""What the generator makes: a chat whose last answer can be judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Check = Callable[[str], bool]
"""Whether an answer (without its end token and its think block) is right."""

MODEL_NAME = "Tiny"


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Args:
        task: what is asked for; the name in tables.
        question: of the user.
        answer: of the model.
        right: judges another answer to the same question.
        thinking: what the model thinks first, if it is asked to think.
    """

    task: str
    question: str
    answer: str
    right: Check
    thinking: str | None = None


@dataclass(frozen=True)
class Conversation:
    """A chat that ends with the model's answer.

    Args:
        task: of its last turn.
        messages: in OpenAI's form; a call's arguments are objects, not text.
        right: judges another last answer.
        tools: offered, in OpenAI's form.
    """

    task: str
    messages: list[Message]
    right: Check
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def thinks(self) -> bool:
        """The last answer begins with a think block."""
        return bool(self.messages[-1].get("reasoning_content"))


def exactly(wanted: str) -> Check:
    """The answer is this text."""
    return lambda answer: answer.strip() == wanted.strip()


def contains(*wanted: str) -> Check:
    """The answer has all of these."""
    return lambda answer: all(each in answer for each in wanted)


def user(content: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": content}


def assistant(content: str, thinking: str | None = None) -> Message:
    """The model's message."""
    message: Message = {"role": "assistant", "content": content}
    if thinking:
        message["reasoning_content"] = thinking
    return message
