"""Greetings, questions about the model itself, and honest refusals."""

from __future__ import annotations

from pathlib import Path

from demo_model.conversation import MODEL_NAME, Turn, exactly
from demo_model.dice import Dice
from demo_model.phrasing import invented, question, request, sometimes_invented, upper_first
from demo_model.words import ADJECTIVES, ALL_WORDS, CITIES, JOBS, LANGUAGES, NAMES, SPORTS

CANNOT = "I am a small demo model and can't do that."
UNKNOWN = "I am a small demo model and don't know that."

_HERE = Path(__file__).parent
# A line: what may be said, and the answer to all of it.
_TALK = tuple(
    (said.split(" | "), answer.format(name=MODEL_NAME))
    for said, answer in (
        line.split(" => ") for line in (_HERE / "talk.txt").read_text(encoding="utf-8").splitlines()
    )
)


def identity(dice: Dice) -> Turn:
    """Small talk."""
    asked, answer = dice.pick(_TALK)
    return Turn(
        "identity",
        dice.pick(asked),
        answer,
        exactly(answer),
        "This is small talk. I answer briefly.",
    )


_LINES = (_HERE / "beyond.txt").read_text(encoding="utf-8").splitlines()
_REQUESTS = tuple(line[2:] for line in _LINES if line.startswith("! "))
_QUESTIONS = tuple(line[2:] for line in _LINES if line.startswith("? "))
_TOPICS = tuple(line[2:] for line in _LINES if line.startswith("* "))


def refusal(dice: Dice) -> Turn:
    """What it can't do and doesn't know: requests, questions and noise."""
    kind = dice.random()
    values = {
        "topic": dice.pick(_TOPICS),
        "word": dice.pick(ALL_WORDS),
        "fake": upper_first(invented(dice)),
        "name": sometimes_invented(dice, NAMES, 0.3, capital=True),
        "surname": upper_first(invented(dice)),
        "city": dice.pick(CITIES),
        "job": dice.pick(JOBS),
        "sport": dice.pick(SPORTS),
        "language": dice.pick(LANGUAGES),
        "adjective": dice.pick(ADJECTIVES),
        "year": str(dice.number(1200, 2040)),
        "number": str(dice.number(2, 999)),
    }
    if kind < 0.45:
        asked, answer = request(dice, dice.pick(_REQUESTS).format(**values)), CANNOT
    elif kind < 0.9:
        asked, answer = question(dice, dice.pick(_QUESTIONS).format(**values)), UNKNOWN
    else:
        asked, answer = _noise(dice), CANNOT
    return Turn(
        "refusal",
        asked,
        answer,
        lambda said: said in (CANNOT, UNKNOWN),
        "This is nothing that I can do or know.",
    )


def _noise(dice: Dice) -> str:
    kind = dice.number(0, 3)
    if kind == 0:
        return " ".join(invented(dice) for _ in range(dice.number(1, 8)))
    if kind == 1:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789 .,;!?/#"
        return "x" + "".join(dice.pick(letters) for _ in range(dice.number(5, 40))).strip()
    if kind == 2:
        return upper_first(" ".join(dice.pick(ALL_WORDS) for _ in range(dice.number(3, 9)))) + "."
    return f"{upper_first(invented(dice))} {dice.pick(ALL_WORDS)} {invented(dice)}?"
