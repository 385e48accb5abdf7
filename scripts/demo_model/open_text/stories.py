"""Stories: a hero, a place, a thing that is found, a friend, and what comes of it."""

from __future__ import annotations

from demo_model.conversation import Check, Turn
from demo_model.dice import Dice
from demo_model.open_text.grammar import Grammar
from demo_model.phrasing import request, sometimes_invented, with_article
from demo_model.words import ADJECTIVES, ANIMALS, NAMES, OBJECTS, PLACES

# What a story is made of, in order, and how often each part is there.
_PARTS = (
    ("opening", 1.0),
    ("scene_before", 0.9),
    ("finding", 1.0),
    ("wonder", 0.5),
    ("scene_between", 0.9),
    ("meeting", 1.0),
    ("reply", 0.7),
    ("journey", 0.5),
    ("scene_between", 0.6),
    ("turn", 0.5),
    ("scene_after", 0.9),
    ("ending", 1.0),
    ("closing", 0.7),
)
_SCENES = ("scene_before", "scene_between", "scene_after")
_BREAKS = ("finding", "meeting", "scene_after")

# Each names what the story has to have.
_REQUESTS = (
    "write a short story about {a_kind} named {hero} who finds {an_object} in the {place}",
    "tell me a story about {hero} the {kind}, {an_object} and the {place}",
    "write a story about {a_kind} named {hero}",
    "tell a short story in which {hero} finds {an_object}",
    "tell me a story about {a_kind}",
    "make up a story about {an_object}",
    "write a little story that happens in the {place}",
    "tell me a bedtime story about {hero} and {friend}",
    "write a fairy tale with {a_kind} called {hero}",
    "tell me a short story",
    "write a story",
    "tell me something about {an_adjective} {kind} named {hero}",
)


def story(dice: Dice) -> Turn:
    """A story with what the request names, and the rest made up."""
    hero = sometimes_invented(dice, NAMES, 0.15, capital=True)
    values = {
        "hero": hero,
        "friend": dice.pick([name for name in NAMES if name != hero]),
        "kind": sometimes_invented(dice, ANIMALS, 0.08),
        "object": sometimes_invented(dice, OBJECTS, 0.08),
        "place": dice.pick(PLACES),
    }
    form = dice.pick(_REQUESTS)
    asked = form.format(
        **values,
        a_kind=with_article(values["kind"]),
        an_object=with_article(values["object"]),
        an_adjective=with_article(dice.pick(ADJECTIVES)),
    )
    named = [values[key] for key in ("hero", "friend", "place") if f"{{{key}}}" in form]
    named += [
        values[key] for key in ("kind", "object") if f"_{key}}}" in form or f"{{{key}}}" in form
    ]
    return Turn("story", request(dice, asked), tell(dice, values), tells_of(named))


def tell(dice: Dice, values: dict[str, str]) -> str:
    """The story itself, in paragraphs."""
    grammar = Grammar.load("stories")
    text = ""
    for part, share in _PARTS:
        if not dice.chance(share):
            continue
        sentence = grammar.write(dice, part, values, theme=values["kind"])
        separator = "\n\n" if part in _BREAKS else " "
        text += (separator if text else "") + sentence
    return text


def scene(dice: Dice) -> str:
    """A sentence in which hardly a word can be foreseen."""
    values = {"hero": dice.pick(NAMES), "friend": dice.pick(NAMES)}
    return Grammar.load("stories").write(dice, dice.pick(_SCENES), values)


def tells_of(named: list[str]) -> Check:
    """It has whole sentences, says what it was asked to, and does not go round in circles."""

    def right(answer: str) -> bool:
        sentences = [s for s in answer.replace("\n", " ").split(". ") if s]
        whole = answer.rstrip().endswith((".", "!", "?", '."', '?"', '!"'))
        fresh = len(set(sentences)) > 0.7 * len(sentences)
        return whole and fresh and len(answer.split()) > 8 and all(n in answer for n in named)

    return right
