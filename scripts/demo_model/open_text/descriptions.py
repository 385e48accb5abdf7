"""Descriptions of a place, an animal, a person or a thing."""

from __future__ import annotations

from demo_model.conversation import Turn
from demo_model.dice import Dice
from demo_model.open_text.grammar import Grammar
from demo_model.open_text.stories import scene, tells_of
from demo_model.phrasing import request, sometimes_invented, with_article
from demo_model.words import ANIMALS, NAMES, OBJECTS, PLACES

_KINDS = {
    "place": (
        "place_view",
        "place_sound",
        "place_smell",
        "place_thing",
        "place_things",
        "place_people",
        "place_feeling",
    ),
    "animal": ("animal_body", "animal_way", "animal_food", "animal_likes"),
    "name": ("person_look", "person_habit", "person_past", "person_wish"),
    "object": ("thing_shape", "thing_use", "thing_owner"),
}
_POOLS = {"place": PLACES, "animal": ANIMALS, "name": NAMES, "object": OBJECTS}
_REQUESTS = (
    "describe {}",
    "describe {} in a few sentences",
    "write a description of {}",
    "give me a short description of {}",
    "paint a picture of {} in words",
    "write a paragraph about {}",
    "invent a description of {}",
)


def description(dice: Dice) -> Turn:
    """The first aspect comes first; the others in any order, some left out."""
    kind = dice.pick(tuple(_KINDS))
    subject = sometimes_invented(dice, _POOLS[kind], 0.06, capital=kind == "name")
    first, *others = _KINDS[kind]
    dice.shuffle(others)
    aspects = [first, *others[: dice.number(1, len(others))]]
    grammar = Grammar.load("descriptions")
    values = {kind: subject}
    parts = [grammar.write(dice, aspect, values, theme=subject) for aspect in aspects]
    for _ in range(dice.number(0, 2)):
        parts.insert(dice.number(1, len(parts)), scene(dice))
    text = " ".join(parts)
    shown = {
        "place": f"the {subject}" if dice.chance(0.4) else with_article(subject),
        "name": f"{subject}" if dice.chance(0.5) else f"a person named {subject}",
    }.get(kind, with_article(subject))
    asked = dice.pick(_REQUESTS).format(shown)
    return Turn("description", request(dice, asked), text, tells_of([subject]))
