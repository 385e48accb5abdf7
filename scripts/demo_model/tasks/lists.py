"""Lists: sorted, reversed, counted, and made up."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from demo_model.conversation import Check, Turn, contains, exactly
from demo_model.dice import Dice
from demo_model.phrasing import question, request
from demo_model.tasks.changes import changed_text
from demo_model.words import ALL_WORDS, CATEGORIES, NAMES, THINGS_IN, WORDS


def sort_numbers(dice: Dice) -> Turn:
    """Up or down."""
    numbers = dice.sample(range(1, dice.pick((100, 100, 1000))), dice.number(3, 7))
    down = dice.chance(0.35)
    order = (
        dice.pick(("from largest to smallest", "in descending order", "from high to low"))
        if down
        else dice.pick(("in ascending order", "from smallest to largest", "from low to high", ""))
    )
    verb = dice.pick(("sort", "order", "put", "arrange")) if order else "sort"
    asked = f"{verb} these numbers{' ' if order else ''}{order}: {', '.join(map(str, numbers))}"
    answer = ", ".join(map(str, sorted(numbers, reverse=down)))
    return Turn("sort_num", request(dice, asked), answer, exactly(answer))


def sort_words(dice: Dice) -> Turn:
    """By the alphabet."""
    words = dice.sample(dice.pick((WORDS, WORDS, NAMES)), dice.number(3, 6))
    forms = (
        "sort these words alphabetically:",
        "put these words in alphabetical order:",
        "sort alphabetically:",
        "arrange these words from A to Z:",
        "order this list alphabetically:",
    )
    answer = ", ".join(sorted(words))
    return changed_text(dice, "sort_words", forms, ", ".join(words), answer)


def reverse_list(dice: Dice) -> Turn:
    """The last first."""
    words = dice.sample(ALL_WORDS, dice.number(3, 7))
    forms = (
        "reverse this list:",
        "write this list in reverse order:",
        "turn this list around:",
        "give me these words in reverse order:",
    )
    answer = ", ".join(reversed(words))
    return changed_text(dice, "reverse_list", forms, ", ".join(words), answer)


def count_items(dice: Dice) -> Turn:
    """How many there are, by numbering them."""
    words = [dice.pick(ALL_WORDS) for _ in range(dice.number(2, 10))]
    forms = (
        "how many items are in this list?",
        "how many words are in this list?",
        "count the items in this list:",
        "count these items:",
        "how long is this list?",
    )
    asked = f"{dice.pick(forms)} {', '.join(words)}"
    numbered = "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    total = f"There are {len(words)} items."
    return Turn(
        "count_items", asked[0].upper() + asked[1:], f"{numbered}\n{total}", contains(total)
    )


def nth_item(dice: Dice) -> Turn:
    """The first, second, .. or last item."""
    words = dice.sample(ALL_WORDS, dice.number(4, 7))
    place, index = dice.pick(
        (("first", 0), ("second", 1), ("third", 2), ("fourth", 3), ("last", -1))
    )
    forms = (
        f"what is the {place} item in this list: {{}}",
        f"which word is {place} in this list: {{}}",
    )
    answer = f"The {place} item is {words[index]}."
    asked = question(dice, dice.pick(forms).format(", ".join(words)))
    return Turn("nth_item", asked, answer, contains(f"is {words[index]}."))


_FORMS: dict[str, Callable[[Sequence[str]], str]] = {
    "numbered": lambda items: "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1)),
    "bullets": lambda items: "\n".join(f"- {item}" for item in items),
    "commas": lambda items: ", ".join(items),
}
_WAYS = {
    "numbered": ("", "", "", " as a numbered list", ", numbered"),
    "bullets": (" as a bullet list", " with bullets", ", one per line with dashes"),
    "commas": (" separated by commas", " in one line", ", comma-separated"),
}
_NUMBERS = ("", "", "two", "three", "four", "five", "six", "seven", "eight")


def make_list(dice: Dice) -> Turn:
    """So many different things of a kind or of a place.

    By the alphabet: the last item then says which ones are left, and none comes twice.
    """
    count = dice.number(2, 8)
    form = dice.pick(("numbered", "numbered", "numbered", "bullets", "commas"))
    shown = str(count) if dice.chance(0.8) else _NUMBERS[count]
    if dice.chance(0.5):
        kind, pool = dice.pick(tuple(CATEGORIES.items()))
        stems = (
            f"list {shown} {kind}",
            f"give me {shown} {kind}",
            f"name {shown} {kind}",
            f"write a list of {shown} {kind}",
            f"make a list of {shown} {kind}",
            f"tell me {shown} {kind}",
        )
    else:
        place, pool = dice.pick(tuple(THINGS_IN.items()))
        stems = (
            f"list {shown} things you find in {place}",
            f"write a list of {shown} things you find in {place}",
            f"name {shown} things that are in {place}",
            f"give me {shown} things you can see in {place}",
            f"write down {shown} things one finds in {place}",
            f"list {shown} things in {place}",
        )
    items = sorted(dice.sample(pool, count))
    asked = request(dice, dice.pick(stems) + dice.pick(_WAYS[form]))
    return Turn("list", asked, _FORMS[form](items), _lists(count, pool))


def _lists(count: int, pool: Sequence[str]) -> Check:
    """So many different members of the pool, in any of the forms."""

    def right(answer: str) -> bool:
        parts = re.split(r"\n|, ", answer.strip())
        items = [re.sub(r"^(\d+\.|-) ", "", part) for part in parts]
        return len(items) == len(set(items)) == count and set(items) <= set(pool)

    return right
