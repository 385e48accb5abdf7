"""Text that questions are about, or that they hide in: sentences, prose, logs, tables, nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable

from demo_model.dice import Dice
from demo_model.open_text.descriptions import description
from demo_model.open_text.explanations import explanation
from demo_model.open_text.letters import diary
from demo_model.open_text.stories import story
from demo_model.phrasing import invented, sometimes_invented, upper_first
from demo_model.words import (
    ADJECTIVES,
    ALL_WORDS,
    ANIMALS,
    CITIES,
    COLORS,
    DAYS,
    FRUITS,
    JOBS,
    NAMES,
    OBJECTS,
    PLACES,
    SPORTS,
    VERBS_ING,
)

_SENTENCES = (
    "{name} found a {color} {object} near the {place}.",
    "The {color} {animal} walked slowly through the {place}.",
    "Every morning {name} visits the {place} with a {animal}.",
    "The {adjective} {animal} was {doing} by the {place}.",
    "{name} bought {number} {fruit}s at the market.",
    "In the {place} there is an old {object} that nobody uses.",
    "{name} the {job} lives in {city}.",
    "The {object} on the table belongs to {name}.",
    "It was a {adjective} day at the {place}.",
    "{name} likes {sport} and {fruit} juice.",
    "The {animal} and the {job} shared a {fruit}.",
    "{name} painted the {object} {color}.",
    "On {day} the {job} closed the {place} early.",
    "We met {name} in {city} after the {sport} game.",
    "Nobody told {name} about the {object}, so the {job} did.",
    "Our train to {city} was {number} minutes late on {day}.",
    "Why is the {object} {color}?",
    "{name} said that the {place} opens at {number}.",
    "There were {number} {object}s in the {color} box!",
)
_GLUE = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "that",
    "for",
    "with",
    "on",
    "as",
    "by",
    "from",
    "at",
    "this",
    "was",
    "are",
    "not",
    "but",
    "which",
    "or",
    "were",
    "has",
    "its",
    "had",
    "when",
    "there",
    "been",
    "more",
    "if",
    "who",
    "would",
    "about",
    "into",
    "than",
    "other",
    "some",
    "could",
    "over",
    "also",
    "after",
    "most",
]


def sentence(dice: Dice) -> str:
    """One sentence about nothing in particular; now and then with unknown words."""
    return dice.pick(_SENTENCES).format(
        name=sometimes_invented(dice, NAMES, 0.1, capital=True),
        color=dice.pick(COLORS),
        object=sometimes_invented(dice, OBJECTS, 0.08),
        place=dice.pick(PLACES),
        animal=sometimes_invented(dice, ANIMALS, 0.08),
        adjective=dice.pick(ADJECTIVES),
        doing=dice.pick(VERBS_ING),
        number=dice.number(2, 60),
        fruit=dice.pick(FRUITS),
        job=dice.pick(JOBS),
        city=dice.pick(CITIES),
        sport=dice.pick(SPORTS),
        day=dice.pick(DAYS),
    )


def _simple(dice: Dice) -> str:
    return " ".join(sentence(dice) for _ in range(dice.number(3, 9)))


def _open(dice: Dice) -> str:
    return dice.pick((story, description, explanation, diary))(dice).answer


def _foreign(dice: Dice) -> str:
    """Sentences of no grammar that the model was taught: any words, in any order."""
    share = dice.pick((0.05, 0.3, 0.8))
    sentences = []
    for _ in range(dice.number(2, 6)):
        words = [
            dice.pick(_GLUE) if dice.chance(0.45) else sometimes_invented(dice, ALL_WORDS, share)
            for _ in range(dice.number(4, 16))
        ]
        comma = dice.number(2, len(words) - 1)
        text = " ".join(words[:comma]) + dice.pick((", ", " ", " ")) + " ".join(words[comma:])
        sentences.append(upper_first(text) + dice.pick((".", ".", ".", "?", "!", ";")))
    return " ".join(sentences)


def _repeated(dice: Dice) -> str:
    """The same again and again, as test prompts have it."""
    return " ".join([sentence(dice)] * dice.number(2, 12))


def _log(dice: Dice) -> str:
    levels = ("INFO", "DEBUG", "WARN", "ERROR")
    lines = []
    for _ in range(dice.number(3, 9)):
        clock = f"{dice.number(0, 23):02d}:{dice.number(0, 59):02d}:{dice.number(0, 59):02d}"
        what = f"{dice.pick(ALL_WORDS)} {dice.pick(VERBS_ING)} id={dice.number(1, 9999)}"
        lines.append(f"{clock} {dice.pick(levels)} {dice.pick(ALL_WORDS)}: {what}")
    return "\n".join(lines)


def _table(dice: Dice) -> str:
    rows = [("name", "city", "count")]
    for _ in range(dice.number(3, 8)):
        rows.append((dice.pick(NAMES), dice.pick(CITIES), str(dice.number(1, 999))))
    return "\n".join(dice.pick((", ", " | ", "\t")).join(row) for row in rows)


def _code(dice: Dice) -> str:
    lines = []
    for _ in range(dice.number(2, 6)):
        a, b = dice.pick(ALL_WORDS), dice.pick(ALL_WORDS)
        lines.append(
            dice.pick(
                (
                    f"{a} = {b}({dice.number(0, 99)})",
                    f"def {a}_{b}({invented(dice)}):\n    return {dice.number(0, 9)}",
                    f"if {a} > {dice.number(0, 99)}:\n    print({b})",
                    f"# {a} {b}",
                    f"const {a} = {{ {b}: {dice.number(0, 99)} }};",
                )
            )
        )
    return "\n".join(lines)


def _json(dice: Dice) -> str:
    records = [
        {dice.pick(ALL_WORDS): dice.pick((dice.number(0, 999), dice.pick(CITIES), True, None))}
        for _ in range(dice.number(2, 6))
    ]
    return json.dumps(records, indent=dice.pick((None, 2)))


_KINDS: tuple[tuple[Callable[[Dice], str], float], ...] = (
    (_simple, 0.3),
    (_open, 0.3),
    (_foreign, 0.2),
    (_repeated, 0.06),
    (_log, 0.05),
    (_table, 0.03),
    (_code, 0.03),
    (_json, 0.03),
)


def paragraph(dice: Dice) -> str:
    """A paragraph of some kind."""
    (make,) = dice.choices([k for k, _ in _KINDS], [w for _, w in _KINDS])
    return make(dice)


def paragraphs(dice: Dice, num_characters: int) -> list[str]:
    """Paragraphs of so many characters in all; at times all of one kind, the last one cut."""
    make: Callable[[Dice], str] = paragraph
    if dice.chance(0.5):
        (make,) = dice.choices([k for k, _ in _KINDS], [w for _, w in _KINDS])
    out: list[str] = []
    while num_characters > 0:
        out.append(_cut(make(dice), num_characters))
        num_characters -= len(out[-1]) + 1
    return out


def _cut(text: str, size: int) -> str:
    """No longer than that, at a word's end."""
    return text if len(text) <= size else text[:size].rpartition(" ")[0] or text[:size]
