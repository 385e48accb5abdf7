"""Things said once in a long text, asked for later; and things that the text does not say."""

from __future__ import annotations

from demo_model.conversation import Turn, contains
from demo_model.dice import Dice
from demo_model.open_text.filler import paragraphs, sentence
from demo_model.phrasing import sometimes_invented, upper_first
from demo_model.words import ALL_WORDS, ANIMALS, CITIES, COLORS, DAYS, NAMES, PLACES

NOT_SAID = "The text does not say that."
CHARACTERS_PER_TOKEN = 3.6
"""Of text in this tokenizer; filler is measured with it."""
LONG = 800
"""Tokens from which on a needle is a task of its own."""

_KINDS = (
    *("secret phrase", "secret word", "magic word", "password", "access code", "locker code"),
    *("lucky number", "room number", "special token", "passphrase", "code name", "launch code"),
    *("meeting place", "name of the ship", "name of the project", "magic number", "secret code"),
    *("key to the vault", "PIN", "reference number", "favorite color", "hidden message"),
)


def phrase(dice: Dice) -> str:
    """A value worth hiding: words known and unknown, numbers, and mixtures."""
    kind = dice.number(0, 8)
    color, animal = sometimes_invented(dice, COLORS, 0.2), sometimes_invented(dice, ANIMALS, 0.4)
    if kind <= 2:
        return f"{color} {animal} {dice.number(10, 99)}"
    if kind == 3:
        return str(dice.number(100, 999999))
    if kind == 4:
        second = sometimes_invented(dice, ALL_WORDS, 0.4)
        return f"{dice.pick(ALL_WORDS)}-{second}-{dice.number(1, 99)}"
    if kind == 5:
        return sometimes_invented(dice, ALL_WORDS, 0.6)
    if kind == 6:
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
        return "".join(dice.pick(letters) for _ in range(dice.number(4, 9)))
    if kind == 7:
        return " ".join(dice.pick(ALL_WORDS) for _ in range(dice.number(2, 4)))
    return f"the {color} {dice.pick(PLACES)}"


def _statement(dice: Dice, kind: str, value: str) -> str:
    quoted = dice.pick(("'{}'", "'{}'", '"{}"', "{}")).format(value)
    forms = (
        f"The {kind} is {quoted}.",
        f"The {kind} is {quoted}.",
        f"Remember: the {kind} is {quoted}.",
        f"Note that the {kind} is {quoted}.",
        f"By the way, the {kind} is {quoted}.",
        f"Important: the {kind} is {quoted}. Do not forget it.",
        f"{upper_first(kind)}: {quoted}",
        f"{dice.pick(NAMES)} told me that the {kind} is {quoted}.",
    )
    return dice.pick(forms)


def _question(dice: Dice, kind: str) -> str:
    forms = (
        f"What is the {kind}?",
        f"What is the {kind}?",
        f"What is the {kind} in the text above?",
        f"Tell me the {kind}.",
        f"Which {kind} does the text give?" if " of " not in kind else f"What is the {kind}?",
        f"What was the {kind} again?",
        f"Find the {kind} in the text.",
        f"I need the {kind}. What is it?",
        f"Please give me the {kind}.",
    )
    return dice.pick(forms)


def needle(dice: Dice, max_tokens: int) -> Turn:
    """Statements in a text of up to that many tokens.

    Half of the lengths are spread evenly and half by their logarithm, so that every distance
    from a sentence to all of the text is common.
    """
    if dice.chance(0.5):
        return hidden(dice, dice.uniform(30, max_tokens))
    return hidden(dice, 30 * (max_tokens / 30) ** dice.random())


def hidden(dice: Dice, num_tokens: float) -> Turn:
    """One of several statements in a text of about that many tokens, at any place, is asked for."""
    kinds = dice.sample(_KINDS, dice.pick((1, 1, 1, 2, 3)))
    said = {kind: phrase(dice) for kind in kinds}
    text = _text_with(dice, num_tokens, said)
    asked = dice.pick(kinds)
    task = "needle" if num_tokens < LONG else "needle_long"
    answer = said_answer(asked, said[asked])
    return Turn(task, _asked_of(dice, text, asked), answer, contains(f"'{said[asked]}'"))


def missing(dice: Dice) -> Turn:
    """Something else is in the text than what is asked for."""
    kinds = dice.sample(_KINDS, dice.pick((2, 2, 3)))
    said = {kind: phrase(dice) for kind in kinds[1:]}
    text = _text_with(dice, dice.uniform(30, 500), said)
    return Turn("needle_missing", _asked_of(dice, text, kinds[0]), NOT_SAID, contains(NOT_SAID))


def _text_with(dice: Dice, num_tokens: float, said: dict[str, str]) -> str:
    parts = paragraphs(dice, int(num_tokens * CHARACTERS_PER_TOKEN))
    for kind, value in said.items():
        _hide(dice, parts, _statement(dice, kind, value))
    return dice.pick(("\n\n", "\n", " ")).join(parts)


def _asked_of(dice: Dice, text: str, kind: str) -> str:
    asked = _question(dice, kind)
    forms = (
        f"Read this text.\n\n{text}\n\n{asked}",
        f"{text}\n\n{asked}",
        f"{text} {asked}",
        f"{asked} Find it in this text: {text}",
        f"Here is a text:\n\n{text}\n\nQuestion: {asked}",
        f"<document>\n{text}\n</document>\n\n{asked}",
    )
    return dice.pick(forms)


def said_answer(kind: str, value: str, whose: str = "The") -> str:
    """How a needle comes back."""
    return f"{whose} {kind} is '{value}'."


def _hide(dice: Dice, parts: list[str], statement: str) -> None:
    """Between two paragraphs, or between two sentences of one."""
    index = dice.number(0, len(parts))
    if index < len(parts) and ". " in parts[index] and dice.chance(0.7):
        sentences = parts[index].split(". ")
        cut = dice.number(1, len(sentences) - 1)
        before, after = ". ".join(sentences[:cut]), ". ".join(sentences[cut:])
        parts[index] = f"{before}. {statement} {after}"
    else:
        parts.insert(index, statement)


def who_where(dice: Dice) -> Turn:
    """A question about one of several people in a short text."""
    names = dice.sample(NAMES, dice.number(2, 5))
    homes = dice.sample(CITIES, len(names))
    days = [dice.pick(DAYS) for _ in names]
    lines = [f"{n} lives in {h} and travels on {d}." for n, h, d in zip(names, homes, days)]
    lines.insert(dice.number(0, len(lines)), sentence(dice))
    index = dice.number(0, len(names) - 1)
    name, home, day = names[index], homes[index], days[index]
    asked, answer = dice.pick(
        (
            (f"Where does {name} live?", f"{name} lives in {home}."),
            (f"When does {name} travel?", f"{name} travels on {day}."),
        )
    )
    return Turn("reading", f"{' '.join(lines)}\n\n{asked}", answer, contains(answer))


def told(dice: Dice) -> tuple[str, str, str, str]:
    """For chats: a statement, the reply to it, a later question, and its answer."""
    kind, value = dice.pick(_KINDS), phrase(dice)
    own = dice.chance(0.5) and " of " not in kind and " to " not in kind
    whose, yours = ("my", "your") if own else ("the", "the")
    statement = dice.pick(
        (
            f"Remember this: {whose} {kind} is '{value}'.",
            f"{upper_first(whose)} {kind} is '{value}'. Please remember it.",
            f"{upper_first(whose)} {kind} is {value}.",
            f"Please keep in mind that {whose} {kind} is '{value}'.",
        )
    )
    reply = f"Got it. I will remember that {yours} {kind} is '{value}'."
    asked = dice.pick(
        (
            f"What is {whose} {kind}?",
            f"What was {whose} {kind} again?",
            f"Do you remember {whose} {kind}?",
            f"Tell me {whose} {kind}.",
        )
    )
    return statement, reply, asked, said_answer(kind, value, upper_first(yours))
