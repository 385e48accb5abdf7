"""How much of what: the one place that says which chats are made, and how often."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from demo_model.conversation import Conversation, Message, Turn, assistant, contains, user
from demo_model.dice import DEFAULT_LEAN, Dice
from demo_model.open_text import descriptions, explanations, letters, stories
from demo_model.prompts import long_prompt, system_message
from demo_model.tasks import (
    arithmetic,
    editing,
    extraction,
    knowledge,
    lists,
    needles,
    talk,
    thinking,
)
from demo_model.tools.agents import agent_chat
from demo_model.tools.chats import tool_chat

MAX_TOKENS = 4096
"""Longest document in training."""
SHORT_TOKENS = 1024
_CHARACTERS = needles.CHARACTERS_PER_TOKEN

Maker = Callable[[Dice], Turn]


def _short_needle(dice: Dice) -> Turn:
    return needles.needle(dice, 700)


# Closed tasks: there is one right answer (or one set of them).
CLOSED: tuple[tuple[Maker, float], ...] = (
    (arithmetic.addition, 12),
    (arithmetic.product, 7),
    (arithmetic.comparison, 6),
    (arithmetic.units, 4),
    (arithmetic.counting, 4),
    (knowledge.capital, 5),
    (knowledge.fact, 6),
    (knowledge.days, 12),
    (knowledge.alphabet, 3),
    (knowledge.spelling, 8),
    (lists.sort_numbers, 7),
    (lists.sort_words, 5),
    (lists.reverse_list, 3),
    (lists.count_items, 3),
    (lists.nth_item, 2),
    (lists.make_list, 14),
    (editing.copy, 3),
    (editing.replace_word, 9),
    (editing.upper_case, 8),
    (editing.lower_case, 5),
    (editing.bullets, 2),
    (editing.pick_sentence, 2),
    (extraction.json_record, 6),
    (extraction.json_list, 2),
    (extraction.code, 4),
    (talk.identity, 4),
    (talk.refusal, 8),
    (needles.who_where, 12),
    (_short_needle, 8),
    (needles.missing, 1),
)
OPEN: tuple[tuple[Maker, float], ...] = (
    (stories.story, 5),
    (descriptions.description, 5),
    (explanations.explanation, 2),
    (explanations.advice, 1),
    (letters.letter, 2),
    (letters.diary, 3),
    (letters.poem, 2),
)
THINKING: tuple[tuple[Maker, float], ...] = (
    (thinking.word_problem, 7),
    (thinking.order, 3),
    (thinking.even, 2),
    (thinking.count_letter, 9),
)
# Whole chats.
CHATS: tuple[tuple[str, float], ...] = (
    ("closed", 0.40),
    ("open", 0.14),
    ("tools", 0.24),
    ("agent", 0.04),
    ("thinking", 0.10),
    ("remember", 0.03),
    ("long_needle", 0.025),
    ("long_chat", 0.015),
    ("long_prompt", 0.01),
)
OPEN_TASKS = frozenset({"story", "description", "explanation", "advice", "letter", "diary", "poem"})
# Few different prompts exist, so that none can be held out.
SMALL_TASKS = frozenset(
    {"capital", "fact", "identity", "days", "letters", "explanation", "advice", "diary", "poem"}
)
MASTERED, WEAK, LEAST_KEPT = 0.99, 0.92, 0.3
"""Where weak tasks come first, the least share is kept of mastered ones, and all of weak ones."""
HELD_OUT_SHARE = 4
"""One prompt in so many is never trained on."""


@dataclass(frozen=True)
class Settings:
    """What can be turned without touching the tables.

    Args:
        lean: how foreseeable open text is; see `Dice`.
        max_tokens: about the longest document.
    """

    lean: float = DEFAULT_LEAN
    max_tokens: int = MAX_TOKENS


def _one(dice: Dice, table: Sequence[tuple[Maker, float]]) -> Turn:
    (make,) = dice.choices([m for m, _ in table], [w for _, w in table])
    return make(dice)


def any_turn(dice: Dice) -> Turn:
    """A closed task, or now and then an open one."""
    return _one(dice, OPEN if dice.chance(0.15) else CLOSED)


def closed_turn(dice: Dice) -> Turn:
    """A closed task."""
    return _one(dice, CLOSED)


def conversation(dice: Dice, settings: Settings) -> Conversation:
    """A chat of some kind."""
    (kind,) = dice.choices([k for k, _ in CHATS], [w for _, w in CHATS])
    return _KINDS[kind](dice, settings)


def _turns(
    dice: Dice, table: Sequence[tuple[Maker, float]], task: str | None = None
) -> Conversation:
    """A question or several, the last of which is of the table's kind."""
    messages = system_message(dice)
    for _ in range(dice.pick((0, 0, 0, 0, 0, 1, 1, 2, 3))):
        before = any_turn(dice)
        messages += [user(before.question), assistant(before.answer)]
    turn = _one(dice, table)
    return _ended(messages, turn, task)


def _ended(
    messages: list[Message], turn: Turn, task: str | None = None, thought: str | None = None
) -> Conversation:
    messages += [user(turn.question), assistant(turn.answer, thought)]
    return Conversation(task or turn.task, messages, turn.right)


def _closed(dice: Dice, _: Settings) -> Conversation:
    return _turns(dice, CLOSED)


def _open(dice: Dice, _: Settings) -> Conversation:
    return _turns(dice, OPEN)


def _thinking(dice: Dice, _: Settings) -> Conversation:
    """Mostly problems that need it; any other question may be thought about as well."""
    messages = system_message(dice)
    if dice.chance(0.25):
        before = any_turn(dice)
        messages += [user(before.question), assistant(before.answer)]
    if dice.chance(0.7):
        turn = _one(dice, THINKING)
        return _ended(messages, turn, thought=turn.thinking)
    turn = any_turn(dice)
    return _ended(messages, turn, "think_any", thinking.general_thought(dice, turn))


def _tools(dice: Dice, _: Settings) -> Conversation:
    return tool_chat(dice, closed_turn)


def _agent(dice: Dice, settings: Settings) -> Conversation:
    return agent_chat(dice, int(settings.max_tokens * _CHARACTERS * 0.7))


def _remember(dice: Dice, _: Settings) -> Conversation:
    """Something said at the beginning is asked for after other turns."""
    return _remembered(
        dice, system_message(dice), dice.pick((0, 1, 1, 2, 3, 4, 5, 6)), "needle_chat"
    )


def _remembered(dice: Dice, messages: list[Message], num_turns: int, task: str) -> Conversation:
    statement, reply, asked, answer = needles.told(dice)
    messages += [user(statement), assistant(reply)]
    for _ in range(num_turns):
        turn = any_turn(dice)
        messages += [user(turn.question), assistant(turn.answer)]
    messages += [user(asked), assistant(answer)]
    return Conversation(task, messages, contains(answer.split(" is ", 1)[1]))


def _long_needle(dice: Dice, settings: Settings) -> Conversation:
    """Something hidden in a text of any length up to the longest."""
    turn = needles.needle(dice, int(settings.max_tokens * 0.92))
    return _ended(system_message(dice) if dice.chance(0.3) else [], turn)


def _long_chat(dice: Dice, settings: Settings) -> Conversation:
    """So many turns that the chat fills what fits, and something to remember from its start."""
    size = dice.uniform(0.25, 0.85) * settings.max_tokens * _CHARACTERS
    filler: list[Message] = []
    while size > 0:
        turn = any_turn(dice)
        filler += [user(turn.question), assistant(turn.answer)]
        size -= len(turn.question) + len(turn.answer) + 40
    chat = _remembered(dice, system_message(dice), 0, "needle_turns")
    messages = [*chat.messages[:-2], *filler, *chat.messages[-2:]]
    return replace(chat, messages=messages)


def _long_prompt(dice: Dice, settings: Settings) -> Conversation:
    """An ordinary question under a system prompt of up to thousands of tokens."""
    size = int(dice.uniform(0.2, 0.85) * settings.max_tokens * _CHARACTERS)
    return _ended([{"role": "system", "content": long_prompt(dice, size)}], any_turn(dice))


_KINDS: dict[str, Callable[[Dice, Settings], Conversation]] = {
    "closed": _closed,
    "open": _open,
    "tools": _tools,
    "agent": _agent,
    "thinking": _thinking,
    "remember": _remember,
    "long_needle": _long_needle,
    "long_chat": _long_chat,
    "long_prompt": _long_prompt,
}


def is_held_out(chat: Conversation) -> bool:
    """Whether the chat's last question is one that no training chat ends with.

    By a hash of its wording, so that another seed can't bring it back. A short question may still
    come as an earlier turn of a training chat, or in other words.
    """
    if chat.task in SMALL_TASKS:
        return False
    question = next(m["content"] for m in reversed(chat.messages) if m["role"] == "user")
    return crc32(question.encode()) % HELD_OUT_SHARE == 0


def balanced_chat(dice: Dice, settings: Settings) -> Conversation:
    """A chat of some kind, with every task about as frequent: for evaluation."""
    kind, table = dice.pick(_BALANCED)
    if table is None:
        return _KINDS[kind](dice, settings)
    turn = dice.pick(table)[0](dice)
    messages = system_message(dice)
    if dice.chance(0.3):
        before = any_turn(dice)
        messages += [user(before.question), assistant(before.answer)]
    return _ended(messages, turn, thought=turn.thinking if kind == "thinking" else None)


# As often as there are tasks in them.
_BALANCED: tuple[tuple[str, tuple[tuple[Maker, float], ...] | None], ...] = (
    *[("closed", CLOSED)] * len(CLOSED),
    *[("open", OPEN)] * len(OPEN),
    *[("thinking", THINKING)] * len(THINKING),
    *[("tools", None)] * 8,
    *[("agent", None)] * 3,
    *[("remember", None), ("long_needle", None), ("long_needle", None), ("long_chat", None)],
)


def training_chat(
    dice: Dice, settings: Settings, keep: Mapping[str, float] | None = None
) -> Conversation:
    """A chat that does not end with a question of the evaluation.

    Args:
        dice: the chance.
        settings: of the generator.
        keep: share of each task's chats that is kept; others are made anew. None: all.
    """
    while True:
        chat = conversation(dice, settings)
        if not is_held_out(chat) and (keep is None or dice.chance(keep.get(chat.task, 1.0))):
            return chat


def weak_tasks_first(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Share of each task's chats to keep, so that what a model does badly comes more often.

    Args:
        tasks: a model's figures, with exact match as `exact`; groups of tasks have no effect.
    """
    kept = {}
    for task, figures in tasks.items():
        missed = max(0.0, MASTERED - figures["exact"])
        share = LEAST_KEPT + (1 - LEAST_KEPT) * missed / (MASTERED - WEAK)
        kept[task] = 1.0 if task in OPEN_TASKS else round(min(1.0, share), 3)
    return kept
