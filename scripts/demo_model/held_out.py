"""Prompts that no training chat ends with, the same for PyTorch and for the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from demo_model.chat import END, ToolFormat, segments
from demo_model.conversation import Conversation
from demo_model.dice import Dice
from demo_model.mixture import SMALL_TASKS, Settings, balanced_chat, is_held_out
from demo_model.tasks.needles import hidden
from demo_model.tokenizer import END_ID, PAD_ID

SEED = 20_240_601
MAX_NEW_TOKENS = 400
RECALL_LENGTHS = (256, 512, 1024, 2048, 3072, 3900, 6000, 8000)
"""Tokens of texts that something is hidden in; the last ones are longer than any in training."""
_TRIES_PER_QUESTION = 800


@dataclass(frozen=True)
class Question:
    """A prompt, and how its answer is judged.

    Args:
        chat: with a right answer as its last message.
        prompt: token ids, up to where the answer begins.
        thinks: the prompt ends within a think block.
    """

    chat: Conversation
    prompt: tuple[int, ...]
    thinks: bool

    @property
    def task(self) -> str:
        """Name in tables."""
        return self.chat.task

    def right(self, answer: str) -> bool:
        """Judge an answer's text, think block and end token included."""
        if not answer.endswith(END):
            return False
        answer = answer.removesuffix(END)
        if self.thinks:
            _, closed, answer = answer.partition("\n</think>\n\n")
            return bool(closed) and self.chat.right(answer)
        return self.chat.right(answer)


def questions(
    tokenizer: Any, tool_format: ToolFormat, per_task: int, settings: Settings
) -> list[Question]:
    """That many of each task, in order of tasks; of a rare one fewer, as the search is bounded."""
    dice = Dice(f"held out {SEED}", settings.lean)
    found: dict[str, list[Question]] = {}
    counts: Counter[str] = Counter()
    for chat in _chats(dice, settings, per_task * _TRIES_PER_QUESTION):
        if counts[chat.task] < per_task:
            question = as_question(tokenizer, chat, tool_format)
            if len(question.prompt) <= settings.max_tokens:
                found.setdefault(chat.task, []).append(question)
                counts[chat.task] += 1
    return [question for task in sorted(found) for question in found[task]]


def _chats(dice: Dice, settings: Settings, tries: int) -> Iterator[Conversation]:
    for _ in range(tries):
        chat = balanced_chat(dice, settings)
        if chat.task in SMALL_TASKS or is_held_out(chat):
            yield chat


def recall_questions(
    tokenizer: Any, tool_format: ToolFormat, length: int, count: int
) -> list[Question]:
    """Something hidden in texts of about that many tokens."""
    dice = Dice(f"recall {SEED} {length}")
    out = []
    for _ in range(count):
        turn = hidden(dice, length)
        messages = [
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        ]
        chat = Conversation("recall", messages, turn.right)
        out.append(as_question(tokenizer, chat, tool_format))
    return out


def as_question(tokenizer: Any, chat: Conversation, tool_format: ToolFormat) -> Question:
    """Encode a chat up to its last answer."""
    texts = [text for text, _ in segments(chat, tool_format)[:-1]]
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = tuple(token for each in encoded for token in each.ids)
    return Question(chat, ids, chat.thinks)


def answer_text(tokenizer: Any, tokens: list[int]) -> str:
    """An answer's text with its end token, and without what follows that."""
    if END_ID in tokens:
        tokens = tokens[: tokens.index(END_ID) + 1]
    kept = [token for token in tokens if token != PAD_ID]
    return str(tokenizer.decode(kept, skip_special_tokens=False))
