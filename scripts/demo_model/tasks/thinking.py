"""Questions that are answered after thinking, with steps that lead to the answer."""

from __future__ import annotations

from demo_model.conversation import Turn, contains
from demo_model.dice import Dice
from demo_model.phrasing import plural, question
from demo_model.words import ADJECTIVES, DAYS, FRUITS, NAMES, OBJECTS


def word_problem(dice: Dice) -> Turn:
    """One step, or two, of arithmetic in words."""
    name, thing = dice.pick(NAMES), plural(dice.pick((*FRUITS, *OBJECTS)))
    a, b, c = dice.number(3, 40), dice.number(2, 20), dice.number(2, 9)
    kind = dice.number(0, 5)
    if kind == 0:
        more = dice.pick(("buys", "finds", "gets", "picks"))
        asked = (
            f"{name} has {a} {thing} and {more} {b} more. How many {thing} does {name} have now?"
        )
        steps = f"{name} starts with {a} {thing}. {b} more means adding. {a} + {b} = {a + b}."
        total = a + b
    elif kind == 1:
        a += b
        less = dice.pick(("gave away", "lost", "sold", "ate"))
        asked = f"{name} had {a} {thing} and {less} {b}. How many {thing} are left?"
        steps = f"{name} starts with {a} {thing}. {b} less means subtracting. {a} - {b} = {a - b}."
        total = a - b
    elif kind == 2:
        a = dice.number(2, 9)
        box = dice.pick(("boxes", "bags", "baskets", "shelves"))
        asked = f"There are {a} {box} with {b} {thing} each. How many {thing} are there in total?"
        steps = f"{a} {box} with {b} {thing} each. That is multiplication. {a} * {b} = {a * b}."
        total = a * b
    elif kind == 3:
        asked = f"{name} shares {b * c} {thing} among {c} friends. How many {thing} does each get?"
        steps = f"Sharing means dividing. {b * c} / {c} = {b}."
        total = b
    elif kind == 4:
        first, second, third = DAYS[:3]
        asked = (
            f"{name} collects {a} {thing} on {first}, {b} on {second} and {c} on {third}. "
            "How many in all?"
        )
        then = f"Then {a + b} + {c} = {a + b + c}."
        steps = f"I need the sum of three numbers. {a} + {b} = {a + b}. {then}"
        total = a + b + c
    else:
        a += b
        asked = (
            f"{name} had {a} {thing}, lost {b} and then found {c}. "
            f"How many {thing} does {name} have?"
        )
        steps = f"First {a} - {b} = {a - b}. Then {a - b} + {c} = {a - b + c}."
        total = a - b + c
    answer = f"The answer is {total} {thing}."
    return Turn("think_math", asked, answer, contains(f"is {total} "), steps)


def order(dice: Dice) -> Turn:
    """Who is the tallest, from pairs."""
    first, second, third = dice.sample(NAMES, 3)
    most, more, least = dice.pick(
        (
            ("tallest", "taller", "shortest"),
            ("oldest", "older", "youngest"),
            ("fastest", "faster", "slowest"),
            ("strongest", "stronger", "weakest"),
        )
    )
    pairs = [(first, second), (second, third)]
    dice.shuffle(pairs)
    said = " ".join(f"{a} is {more} than {b}." for a, b in pairs)
    top = dice.chance(0.6)
    found, word = (first, most) if top else (third, least)
    steps = (
        f"{first} is {more} than {second}, and {second} is {more} than {third}. "
        f"So the order is {first}, {second}, {third}. "
        f"The {'first' if top else 'last'} one is {found}."
    )
    answer = f"{found} is the {word}."
    return Turn("think_logic", f"{said} Who is the {word}?", answer, contains(answer), steps)


def even(dice: Dice) -> Turn:
    """By the last digit."""
    number = dice.number(2, 9999)
    word = "odd" if number % 2 else "even"
    forms = (
        f"is {number} even or odd",
        f"is the number {number} odd or even",
        f"is {number} an even number or an odd one",
    )
    last = number % 10
    steps = f"The last digit of {number} is {last}. {last} is {word}, so {number} is {word}."
    return Turn(
        "think_even",
        question(dice, dice.pick(forms)),
        f"{number} is {word}.",
        contains(f"{number} is {word}."),
        steps,
    )


def count_letter(dice: Dice) -> Turn:
    """How often a letter is in a word, by spelling it."""
    word = dice.pick((*ADJECTIVES, *OBJECTS, *FRUITS))
    letter = dice.pick(word) if dice.chance(0.85) else dice.pick("aeioulnrst")
    count = 0
    steps = []
    for each in word:
        count += each == letter
        steps.append(f"{each}: {count}")
    times = "time" if count == 1 else "times"
    forms = (
        f"how many times is the letter {letter} in {word}",
        f"how often does {letter} occur in the word {word}",
        f"count the letter {letter} in {word}",
    )
    answer = f"The letter {letter} is in {word} {count} {times}."
    thinking = f"I spell it and count. {', '.join(steps)}."
    return Turn(
        "think_letters",
        question(dice, dice.pick(forms)),
        answer,
        contains(answer),
        thinking,
    )


def general_thought(dice: Dice, turn: Turn) -> str:
    """A short thought for a question that needs none."""
    if turn.thinking:
        return turn.thinking
    return dice.pick(
        (
            "This is a simple task. I can answer directly.",
            "I know how to do this. I will give the answer.",
            "The user wants a direct answer. Here it is.",
        )
    )
