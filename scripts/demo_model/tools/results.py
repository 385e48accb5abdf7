"""What a tool gives back, and what the model says about it."""

from __future__ import annotations

import json
from typing import Any

from demo_model.dice import Dice
from demo_model.phrasing import in_words, invented, sometimes_invented
from demo_model.tools.requests import Call
from demo_model.words import ALL_WORDS, CITIES, NAMES

_CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear")
_FAULTS = (
    "not found",
    "unavailable",
    "permission denied",
    "timeout",
    "invalid input",
    "no connection",
)


def result_of(dice: Dice, call: Call) -> tuple[str, str, str]:
    """A result as text, the reply to it, and what the reply must have in it."""
    if dice.chance(0.08):
        fault = dice.pick(_FAULTS)
        return json.dumps({"error": fault}), f"Sorry, that failed: {fault}.", fault
    bare = call.name.lower().replace("_", "").replace("-", "")
    if "weather" in bare and dice.chance(0.8):
        return _weather(dice, call)
    kind = dice.random()
    if kind < 0.2:
        return json.dumps({"status": dice.pick(("ok", "done", "success"))}), "It is done.", "done"
    if kind < 0.35:
        value = _value(dice)
        return json.dumps({"result": value}), f"The result is {_shown(value)}.", _shown(value)
    if kind < 0.45:
        value = _value(dice)
        return _shown(value), f"The result is {_shown(value)}.", _shown(value)
    fields = {_key(dice): _value(dice) for _ in range(dice.number(1, 3))}
    said = in_words([f"the {key.replace('_', ' ')} is {_shown(v)}" for key, v in fields.items()])
    text = json.dumps(fields, indent=dice.pick((None, None, 2)))
    return text, said[0].upper() + said[1:] + ".", said[1:]


def _weather(dice: Dice, call: Call) -> tuple[str, str, str]:
    place = next((v for k, v in call.arguments.items() if isinstance(v, str)), "the city")
    place = next((v for k, v in call.arguments.items() if k in ("city", "location")), place)
    degrees, condition = dice.number(-20, 40), dice.pick(_CONDITIONS)
    fields: dict[str, Any] = {
        dice.pick(("temperature", "temperature", "temp", "degrees")): degrees,
        dice.pick(("condition", "condition", "conditions", "sky", "weather")): condition,
    }
    if dice.chance(0.5):
        fields["city"] = place
    if dice.chance(0.3):
        fields["humidity"] = dice.number(10, 99)
    if dice.chance(0.3):
        fields["unit"] = dice.pick(("celsius", "fahrenheit"))
    items = list(fields.items())
    dice.shuffle(items)
    fields = dict(items)
    reply = f"It is {condition} in {place}, with a temperature of {degrees} degrees."
    return json.dumps(fields), reply, f"{degrees} degrees"


def _key(dice: Dice) -> str:
    usual = ("id", "total", "price", "time", "count", "name", "status", "owner", "city", "code")
    return dice.pick(usual) if dice.chance(0.6) else sometimes_invented(dice, ALL_WORDS, 0.3)


def _value(dice: Dice) -> Any:
    return dice.pick(
        (
            dice.number(0, 9999),
            dice.number(0, 9999) / 100,
            dice.pick(NAMES),
            dice.pick(CITIES),
            dice.pick(ALL_WORDS),
            invented(dice),
            f"{dice.number(0, 23):02d}:{dice.number(0, 59):02d}",
        )
    )


def _shown(value: Any) -> str:
    return str(value)
