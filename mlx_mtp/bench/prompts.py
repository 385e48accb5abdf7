"""Prompts of a few lengths that differ in their first sentence, as servers cache prefixes."""

import random
from typing import NamedTuple

# story: one line, always with the same task; short: one line, with varied tasks; medium and long: a
# text of `_WORDS` words, and a task.
KINDS = ("story", "short", "medium", "long")
_WORDS = {"medium": 400, "long": 3000}
_ATTEMPTS = 16

_NAMES = ("Anna", "Ben", "Clara", "Dora", "Emil", "Greta", "Ivan", "Leo", "Mina", "Otto", "Vera")
_ANIMALS = ("fox", "owl", "bear", "otter", "badger", "heron", "hare", "lynx", "mole", "raven")
_THINGS = (
    *("lamp", "map", "bell", "key", "coat", "boat", "letter", "clock", "kite", "spoon", "drum"),
    *("rope", "mirror", "basket", "wheel"),
)
_PLACES = (
    *("in the forest", "by the lake", "in the village", "near the mill", "under the bridge"),
    *("at the harbor", "behind the castle", "on the hill", "in the market", "on the island"),
)
_SHORT = (
    "Write a short story about a {animal} named {name} who finds a {thing} {place}.",
    "{name} sells a {thing} {place} for {small} coins and buys {count} apples at 3 coins each. "
    "How many coins are left? Explain each step.",
    "List {count} uses of a {thing} {place}, with a sentence about each.",
    "A {animal} named {name} has lost a {thing} {place}. Write the notice that {name} puts up.",
    "Write a Python function {thing}_{count} that returns the {count} largest numbers of a list, "
    "and say how it works.",
    "Compare a {thing} with a {other}: what is each good for {place}? Give {count} points.",
    "{name} the {animal} meets {friend} {place}. Write what they say about a {thing}.",
    "Explain how a {thing} works to {name}, a curious {animal} who lives {place}.",
)
_SENTENCES = (
    "{name} the {animal} carried a {thing} to {friend}, who was waiting {place}.",
    "It took {count} days, and on the last of them the {thing} lay {place}.",
    "{friend} had never seen a {thing} that looked so much like a {other}.",
    "Nobody {place} knew why the {animal} wanted {count} coins for it.",
    "When the rain came, {name} hid the {thing} {place} and went home.",
    "{name} wrote {count} lines about the {thing} and gave them to {friend}.",
    "The {other} was older than the {thing}, but it was kept {place} all the same.",
    "So {friend} asked the {animal} {place}, and was told to come back in {count} weeks.",
)
_TASK = "Tell this again in your own words, and say what {name} did with the {thing}."


class Prompt(NamedTuple):
    """A user's message, and a seed for the sampling of its answer."""

    text: str
    seed: int


class PromptSource:
    """The prompts of one run; the same seed and calls give the same prompts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._used, self._calls = set[str](), 0

    def next(self, kind: str, count: int) -> list[Prompt]:
        """Returns `count` different prompts of one of `KINDS`, to send together.

        The tasks take turns.
        """
        self._calls += 1
        return [self._unused(kind, self._calls + index) for index in range(count)]

    def _unused(self, kind: str, number: int) -> Prompt:
        # If all variants of a task are used up, the next task is tried.
        texts = (self._text(kind, number + attempt) for attempt in range(_ATTEMPTS))
        text = next((text for text in texts if text not in self._used), None)
        text = text or f"{self._text(kind, number)} (Number {len(self._used)})"
        self._used.add(text)
        return Prompt(text, self._random.getrandbits(31))

    def _text(self, kind: str, number: int) -> str:
        words = self._words()
        if kind not in _WORDS:
            return _SHORT[0 if kind == "story" else number % len(_SHORT)].format(**words)
        sentences = [_SENTENCES[0].format(**words)]
        length = len(sentences[0].split())
        while length < _WORDS[kind]:
            # About half of the sentences use the names of the task, so that the task makes sense.
            chosen = self._words() | (words if self._random.random() < 0.5 else {})
            sentences.append(self._random.choice(_SENTENCES).format(**chosen))
            length += len(sentences[-1].split())
        return f"{' '.join(sentences)}\n\n{_TASK.format(**words)}"

    def _words(self) -> dict[str, str]:
        chance = self._random
        words = dict(zip(("name", "friend"), chance.sample(_NAMES, 2)))
        words |= zip(("thing", "other"), chance.sample(_THINGS, 2))
        words |= {"animal": chance.choice(_ANIMALS), "place": chance.choice(_PLACES)}
        return words | {"count": f"{chance.randint(3, 12)}", "small": f"{chance.randint(40, 400)}"}
