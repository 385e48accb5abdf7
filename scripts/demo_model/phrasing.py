"""How people ask: wrappers for questions and requests, made-up words, lists in words."""

from __future__ import annotations

from collections.abc import Sequence

from demo_model.dice import Dice

_ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "bl",
    "br",
    "cl",
    "cr",
    "dr",
    "fl",
    "gr",
    "pl",
    "pr",
    "sh",
    "st",
    "th",
    "tr",
    "qu",
    "sk",
    "sn",
    "ch",
    "kr",
]
_NUCLEI = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "oo", "ou", "ie"]
_CODAS = ["", "", "", "n", "r", "s", "l", "t", "k", "m", "x", "nd", "sh", "ck", "rt", "lf"]

_BEFORE_REQUEST = (
    *("Please {}", "please {}", "Can you {}", "Could you {}", "Could you please {}"),
    *("I need you to {}", "I want you to {}", "Would you {}", "Hey, {}", "Hi! Please {}"),
    *("Quick one: {}", "Your task: {}", "Now {}", "Next, {}", "OK, {}", "Help me: {}"),
)
_ASKING = ("Can you", "Could you", "Would you")
_AFTER = ("", "", "", "", "", "", " Thanks!", " Thank you.", " Be brief.", " please", " :)")
_BEFORE_QUESTION = (
    *("Tell me: {}", "Quick question: {}", "Hey, {}", "Hi! {}", "I wonder, {}", "Say, {}"),
    *("Do you know: {}", "Please answer: {}", "Question: {}", "One thing: {}", "OK, {}"),
)


def upper_first(text: str) -> str:
    """With a capital first letter."""
    return text[:1].upper() + text[1:]


def request(dice: Dice, text: str) -> str:
    """A request from an imperative without a capital or an end ("sort these words: a, b").

    What follows a colon or a newline stays as it is, so no word is put behind it.
    """
    holds_data = ":" in text or "\n" in text or '"' in text
    if dice.chance(0.4):
        return upper_first(text) + ("" if holds_data else dice.pick((".", ".", ".", "", "!")))
    opener = dice.pick(_BEFORE_REQUEST)
    asked = opener.format(text)
    if holds_data:
        return asked
    after = dice.pick(_AFTER)
    if after == " please":
        return asked + after
    end = "?" if opener.startswith(_ASKING) else dice.pick((".", ".", "" if not after else "."))
    return asked + end + after


def question(dice: Dice, text: str) -> str:
    """A question from one without a capital or its mark ("what is 3 + 4")."""
    kind = dice.random()
    if kind < 0.5:
        return upper_first(text) + "?"
    if kind < 0.6:
        return text + dice.pick(("", "?"))
    if kind < 0.85:
        return dice.pick(_BEFORE_QUESTION).format(text) + "?"
    return upper_first(text) + "?" + dice.pick((" Thanks!", " Be brief.", " I forgot.", " Please."))


def invented(dice: Dice) -> str:
    """A word that no list has, so that copying can't lean on a known vocabulary."""
    count = dice.pick((1, 2, 2, 2, 3))
    return "".join(
        dice.pick(_ONSETS) + dice.pick(_NUCLEI) + dice.pick(_CODAS) for _ in range(count)
    )


def sometimes_invented(
    dice: Dice, words: Sequence[str], share: float, *, capital: bool = False
) -> str:
    """One of the words or, that often, an invented one."""
    if not dice.chance(share):
        return dice.pick(words)
    word = invented(dice)
    return upper_first(word) if capital else word


def in_words(items: Sequence[str], last: str = "and") -> str:
    """ "a", "a and b", "a, b and c"."""
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def with_article(word: str) -> str:
    """ "a fox", "an owl"."""
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


def plural(noun: str) -> str:
    """Of a regular English noun."""
    irregular = {"sheep": "sheep", "mouse": "mice", "goose": "geese", "bison": "bison"}
    irregular |= {
        "deer": "deer",
        "moose": "moose",
        "wolf": "wolves",
        "leaf": "leaves",
        "fish": "fish",
    }
    if noun in irregular:
        return irregular[noun]
    if noun.endswith(("s", "x", "ch", "sh", "tomato", "potato", "mango")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"
