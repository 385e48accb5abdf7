"""Questions that the bundled model answers as it was trained to, whichever client asks."""

import json
from pathlib import Path
from typing import NamedTuple

_DATA = json.loads((Path(__file__).parents[1] / "data" / "demo_prompts.json").read_text("utf-8"))
CITIES = _DATA["cities"][:4]
WEATHER = _DATA["weather_tool"]
FUNCTION = WEATHER["function"]


class Asked(NamedTuple):
    """A question and what the model answers at temperature 0."""

    question: str
    answer: str


SENTENCE = Asked("Sort these words: pear, apple, fig.", "apple, fig, pear")


def weather_question(city: str) -> str:
    return f"What is the weather in {city} in celsius?"


def called(city: str) -> dict[str, str]:
    """Returns the arguments of the model's tool call for `city`."""
    return {"city": city, "unit": "celsius"}
