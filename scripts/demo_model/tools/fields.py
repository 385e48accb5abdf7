"""Parameters of tools: their names, JSON schemas, values, and how people say the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo_model.dice import Dice
from demo_model.open_text.filler import sentence
from demo_model.phrasing import in_words, sometimes_invented, upper_first
from demo_model.words import (
    ALL_WORDS,
    CITIES,
    DAYS,
    NAMES,
    WORDS,
)

Schema = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """A value, and what a request says so that it is meant."""

    content: Any
    said: str


@dataclass(frozen=True)
class Field:
    """One kind of parameter.

    Args:
        names: that it goes by.
        descriptions: that it may have.
        schema: without the description.
        value: one at random, said as part of a request ("in Paris").
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    schema: Callable[[Dice], Schema]
    value: Callable[[Dice, Schema], Value]


def string_schema(_: Dice) -> Schema:
    """Any text."""
    return {"type": "string"}


def integer_schema(_: Dice) -> Schema:
    """A whole number."""
    return {"type": "integer"}


def number_schema(_: Dice) -> Schema:
    """Any number."""
    return {"type": "number"}


def boolean_schema(_: Dice) -> Schema:
    """True or false."""
    return {"type": "boolean"}


def enum_schema(*choices: tuple[str, ...]) -> Callable[[Dice], Schema]:
    """One of several sets of words, in a case of the client's."""

    def schema(dice: Dice) -> Schema:
        change = dice.pick((str.lower, str.lower, str.lower, str.upper, str.capitalize))
        return {"type": "string", "enum": [change(word) for word in dice.pick(choices)]}

    return schema


def array_schema(item: Schema) -> Callable[[Dice], Schema]:
    """Several of one kind."""
    return lambda _: {"type": "array", "items": item}


def copied(form: str, make: Callable[[Dice], str]) -> Callable[[Dice, Schema], Value]:
    """A value that stands in the request as it is."""

    def value(dice: Dice, _: Schema) -> Value:
        content = make(dice)
        return Value(content, form.format(content))

    return value


def counted(*forms: str, low: int = 1, high: int = 99) -> Callable[[Dice, Schema], Value]:
    """A whole number in a range."""

    def value(dice: Dice, _: Schema) -> Value:
        content = dice.number(low, high)
        return Value(content, dice.pick(forms).format(content))

    return value


def chosen(*forms: str) -> Callable[[Dice, Schema], Value]:
    """A member of the schema's enum; a request may write it in its own case."""

    def value(dice: Dice, schema: Schema) -> Value:
        content = dice.pick(schema["enum"])
        shown = dice.pick((content, content.lower(), content.capitalize()))
        return Value(content, dice.pick(forms).format(shown.replace("_", " ")))

    return value


def switched(on: str, off: str) -> Callable[[Dice, Schema], Value]:
    """True or false, each said its own way."""

    def value(dice: Dice, _: Schema) -> Value:
        content = dice.chance(0.6)
        return Value(content, on if content else off)

    return value


def amount(dice: Dice, _: Schema) -> Value:
    """Money."""
    content = dice.pick(
        (dice.number(1, 500), dice.number(1, 5000) / 10, dice.number(100, 9999) / 100)
    )
    return Value(
        content, dice.pick(("for {} dollars", "at {} dollars", "worth {} dollars")).format(content)
    )


def tags(dice: Dice, _: Schema) -> Value:
    """Some words."""
    tags = [sometimes_invented(dice, WORDS, 0.2) for _ in range(dice.number(1, 4))]
    return Value(
        tags, dice.pick(("tagged {}", "with the tags {}", "with tags {}")).format(in_words(tags))
    )


def numbers(dice: Dice, _: Schema) -> Value:
    """Some numbers."""
    numbers = [dice.number(1, 999) for _ in range(dice.number(2, 5))]
    return Value(numbers, f"for the numbers {in_words([str(n) for n in numbers])}")


def address_schema(_: Dice) -> Schema:
    """A street, a number and a city."""
    inner = {
        "street": {"type": "string"},
        "number": {"type": "integer"},
        "city": {"type": "string"},
    }
    return {"type": "object", "properties": inner, "required": list(inner)}


def address(dice: Dice, _: Schema) -> Value:
    """An address, said in one line."""
    street = f"{upper_first(sometimes_invented(dice, WORDS, 0.3))} Street"
    number, town = dice.number(1, 200), city(dice)
    content = {"street": street, "number": number, "city": town}
    return Value(content, f"to {number} {street} in {town}")


def size_schema(_: Dice) -> Schema:
    """A width and a height."""
    inner = {"width": {"type": "integer"}, "height": {"type": "integer"}}
    return {"type": "object", "properties": inner, "required": ["width", "height"]}


def size(dice: Dice, _: Schema) -> Value:
    """A size, said in one phrase."""
    width, height = dice.number(1, 99), dice.number(1, 99)
    return Value({"width": width, "height": height}, f"{width} by {height} in size")


def city(dice: Dice) -> str:
    """A city, at times an unknown one."""
    return sometimes_invented(dice, CITIES, 0.25, capital=True)


def person(dice: Dice) -> str:
    """A first name, at times an unknown one."""
    return sometimes_invented(dice, NAMES, 0.25, capital=True)


def title(dice: Dice) -> str:
    """Two words."""
    return f"{upper_first(sometimes_invented(dice, ALL_WORDS, 0.2))} {dice.pick(ALL_WORDS)}"


def topic(dice: Dice) -> str:
    """A few words."""
    words = [sometimes_invented(dice, ALL_WORDS, 0.2) for _ in range(dice.number(1, 3))]
    return " ".join(words)


def path(dice: Dice) -> str:
    """Of a file."""
    folder = dice.pick(("", "src/", "docs/", "notes/", f"{dice.pick(WORDS)}/", "/tmp/", "./"))
    ending = dice.pick(("txt", "md", "py", "json", "csv", "log", "yaml"))
    return f"{folder}{sometimes_invented(dice, ALL_WORDS, 0.3)}.{ending}"


def date(dice: Dice) -> str:
    """A weekday or a date."""
    dated = f"20{dice.number(20, 35)}-{dice.number(1, 12):02d}-{dice.number(1, 28):02d}"
    return dice.pick((dice.pick(DAYS), dated))


def clock(dice: Dice) -> str:
    """A time of day."""
    return f"{dice.number(0, 23):02d}:{dice.pick((0, 15, 30, 45, dice.number(0, 59))):02d}"


def mail(dice: Dice) -> str:
    """An address for mail."""
    host = sometimes_invented(dice, WORDS, 0.4)
    return f"{person(dice).lower()}@{host}.{dice.pick(('com', 'org', 'net'))}"


def note(dice: Dice) -> str:
    """A sentence without its mark."""
    return sentence(dice).rstrip(".!?")
