"""What tasks share that ask for a text in another form."""

from __future__ import annotations

from collections.abc import Sequence

from demo_model.conversation import Turn, exactly
from demo_model.dice import Dice
from demo_model.phrasing import request


def changed_text(dice: Dice, task: str, forms: Sequence[str], text: str, answer: str) -> Turn:
    """One of the requests with the text behind it; only the very answer is right."""
    return Turn(task, request(dice, f"{dice.pick(forms)} {text}"), answer, exactly(answer))
