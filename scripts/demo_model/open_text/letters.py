"""Letters, diary entries and small poems."""

from __future__ import annotations

from demo_model.conversation import Check, Turn
from demo_model.dice import Dice
from demo_model.open_text.grammar import Grammar
from demo_model.open_text.stories import scene, tells_of
from demo_model.phrasing import request, sometimes_invented
from demo_model.words import NAMES

_LETTERS = (
    "write a letter to {to}",
    "write a short letter from {from_} to {to}",
    "write a friendly letter to my friend {to}",
    "draft a letter from {from_} to {to}",
)
_DIARIES = (
    "write a diary entry",
    "write a page of a diary",
    "write today's diary entry",
    "make up a diary entry",
)
_POEMS = (
    "write a poem",
    "write a short poem",
    "compose a little poem",
    "write me a poem of {count} lines",
    "give me a poem with {count} lines",
)


def letter(dice: Dice) -> Turn:
    """With greeting and signature."""
    to = sometimes_invented(dice, NAMES, 0.1, capital=True)
    sender = dice.pick([name for name in NAMES if name != to])
    values = {"to": to}
    parts = ["opening", "news"] + [p for p in ("plan", "question") if dice.chance(0.6)]
    grammar = Grammar.load("letters")
    form = dice.pick(_LETTERS)
    greeting = grammar.write(dice, "greeting", values)
    written = [grammar.write(dice, part, values, theme=to) for part in parts]
    if dice.chance(0.8):
        written.insert(dice.number(1, 2), scene(dice))
    body = " ".join(written)
    ending = dice.leaning(("With love,", "Yours,", "Warmly,", "Best wishes,"), "letters.end", to)
    text = f"{greeting}\n\n{body}\n\n{ending}\n{sender}"
    named = [to, *([sender] if "{from_}" in form else [])]
    return Turn("letter", request(dice, form.format(to=to, from_=sender)), text, _letter(named))


def _letter(named: list[str]) -> Check:
    def right(answer: str) -> bool:
        parts = answer.strip().split("\n\n")
        return len(parts) == 3 and parts[0].endswith(",") and all(n in answer for n in named)

    return right


def diary(dice: Dice) -> Turn:
    """A day in a few sentences."""
    grammar = Grammar.load("letters")
    parts = ["diary_start", *["diary_middle"] * dice.number(1, 2), "diary_end"]
    written: list[str] = []
    for part in parts:
        sentence = grammar.write(dice, part, {}, theme=written[0][:12] if written else "")
        if sentence not in written:
            written.append(sentence)
        if part == "diary_middle" and dice.chance(0.7):
            written.append(scene(dice))
    return Turn("diary", request(dice, dice.pick(_DIARIES)), " ".join(written), tells_of([]))


def poem(dice: Dice) -> Turn:
    """Lines, the last of which ends it."""
    grammar = Grammar.load("letters")
    form, count = dice.pick(_POEMS), dice.number(3, 5)
    lines: list[str] = []
    while len(lines) < count - 1:
        line = grammar.write(dice, "poem_line", {}, theme=lines[0][:10] if lines else "")
        if line not in lines:
            lines.append(line)
    lines.append(grammar.write(dice, "poem_end", {}, theme=lines[0][:10]))
    lines[-1] = lines[-1][0].lower() + lines[-1][1:]
    asked = request(dice, form.format(count=count))
    return Turn("poem", asked, "\n".join(lines), _poem(count if "{count}" in form else None))


def _poem(count: int | None) -> Check:
    def right(answer: str) -> bool:
        lines = answer.strip().split("\n")
        return (len(lines) == count if count else 3 <= len(lines) <= 5) and answer.endswith(".")

    return right
