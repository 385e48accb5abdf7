"""JSON from sentences, and short Python functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo_model.conversation import Check, Turn, exactly
from demo_model.dice import Dice
from demo_model.phrasing import in_words, request, sometimes_invented
from demo_model.words import CITIES, COLORS, DAYS, FRUITS, JOBS, NAMES, OBJECTS, SPORTS

_PEOPLE = (
    "{name} is a {age} year old {job} from {city} who enjoys {hobby}.",
    "My friend {name}, aged {age}, works as a {job} in {city} and plays {hobby}.",
    "In {city} there lives a {job} named {name}. {name} is {age} and loves {hobby}.",
    "Meet {name}: {job}, {age}, based in {city}, hobby {hobby}.",
    "{name} ({age}) has been a {job} in {city} for years and likes {hobby}.",
)
_ORDERS = (
    "{customer} ordered {quantity} {color} {item} for {day}.",
    "Order for {customer}: {quantity} x {item}, {color}, to arrive on {day}.",
    "Please send {quantity} {item} in {color} to {customer} by {day}.",
    "On {day} {customer} wants {quantity} {item}, all of them {color}.",
)


def json_record(dice: Dice) -> Turn:
    """Some fields of a sentence as a JSON object."""
    if dice.chance(0.6):
        form, fields = (
            dice.pick(_PEOPLE),
            {
                "name": sometimes_invented(dice, NAMES, 0.25, capital=True),
                "age": dice.number(18, 90),
                "city": sometimes_invented(dice, CITIES, 0.25, capital=True),
                "job": dice.pick(JOBS),
                "hobby": dice.pick(SPORTS),
            },
        )
    else:
        form, fields = (
            dice.pick(_ORDERS),
            {
                "customer": sometimes_invented(dice, NAMES, 0.25, capital=True),
                "quantity": dice.number(2, 99),
                "item": sometimes_invented(dice, OBJECTS, 0.2) + "s",
                "color": dice.pick(COLORS),
                "day": dice.pick(DAYS),
            },
        )
    sentence = form.format(**fields)
    keys = dice.sample(list(fields), dice.number(2, len(fields)))
    indent = dice.pick((None, None, 2))
    answer = json.dumps({key: fields[key] for key in keys}, indent=indent)
    listed, kind = in_words(keys), "pretty-printed JSON" if indent else "JSON"
    forms = (
        f"extract {listed} as {kind} from this sentence: {sentence}",
        f"give me {listed} as {kind}: {sentence}",
        f"turn this into {kind} with the keys {listed}: {sentence}",
        f"read this and answer in {kind} with {listed}: {sentence}",
        f"write {kind} with the fields {listed} for this text: {sentence}",
    )
    return Turn("json", request(dice, dice.pick(forms)), answer, same_json(answer))


def json_list(dice: Dice) -> Turn:
    """Words as a JSON array."""
    words = dice.sample((*FRUITS, *OBJECTS, *COLORS), dice.number(2, 7))
    answer = json.dumps(words)
    forms = (
        "turn this list into a JSON array:",
        "write these words as a JSON array:",
        "give me a JSON list of",
    )
    asked = request(dice, f"{dice.pick(forms)} {', '.join(words)}")
    return Turn("json_list", asked, answer, same_json(answer))


def same_json(wanted: str) -> Check:
    """The answer is JSON with the same content."""
    content = json.loads(wanted)

    def right(answer: str) -> bool:
        try:
            found: Any = json.loads(answer)
        except ValueError:
            return False
        return bool(found == content)

    return right


def _functions() -> list[tuple[str, str]]:
    """What each function does, and its source with NAME for a variable."""
    text = (Path(__file__).parent / "functions.txt").read_text(encoding="utf-8")
    blocks = text.strip().split("\n\n")
    return [
        (title.removeprefix("# "), body) for title, _, body in (b.partition("\n") for b in blocks)
    ]


FUNCTIONS = _functions()


def code(dice: Dice) -> Turn:
    """A function that does something well known."""
    purpose, source = dice.pick(FUNCTIONS)
    name = dice.pick(("x", "n", "s", "item", "value", "text"))
    named = "NAME" in source and dice.chance(0.5)
    source = source.replace("NAME", name if named else "value")
    forms = (
        "write a Python function that {}",
        "give me a Python function that {}",
        "show me Python code that {}",
        "write Python code that {}",
        "implement a function in Python that {}",
    )
    asked = request(
        dice, dice.pick(forms).format(purpose) + (f" with a variable named {name}" if named else "")
    )
    answer = f"Here is a Python function that {purpose}:\n\n```python\n{source}\n```"
    return Turn("code", asked, answer, exactly(answer))
