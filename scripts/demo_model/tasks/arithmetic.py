"""Sums, products, comparisons and units."""

from __future__ import annotations

from demo_model.conversation import Turn, contains, exactly
from demo_model.dice import Dice
from demo_model.phrasing import question, request

# From, to, factor, and one of the first.
UNITS = (
    ("kilometers", "meters", 1000, "kilometer"),
    ("meters", "centimeters", 100, "meter"),
    ("centimeters", "millimeters", 10, "centimeter"),
    ("hours", "minutes", 60, "hour"),
    ("minutes", "seconds", 60, "minute"),
    ("days", "hours", 24, "day"),
    ("weeks", "days", 7, "week"),
    ("years", "months", 12, "year"),
    ("kilograms", "grams", 1000, "kilogram"),
    ("liters", "milliliters", 1000, "liter"),
    ("feet", "inches", 12, "foot"),
    ("yards", "feet", 3, "yard"),
)


def _asked(dice: Dice, expression: str, in_words: str) -> str:
    """Some way of asking for a result."""
    if dice.chance(0.15):
        return dice.pick((f"{expression} = ?", f"{expression} =", expression, f"{expression}?"))
    shown = dice.pick((expression, in_words))
    if dice.chance(0.5):
        form = dice.pick(
            ("what is {}", "how much is {}", "what does {} make", "what do you get for {}")
        )
        return question(dice, form.format(shown))
    form = dice.pick(("compute {}", "calculate {}", "work out {}", "give me the result of {}"))
    return request(dice, form.format(shown))


def addition(dice: Dice) -> Turn:
    """A sum or difference of numbers below 100, or column by column of three digits."""
    plus = dice.chance(0.65)
    big = dice.chance(0.4)
    a, b = (
        (dice.number(100, 999), dice.number(100, 999))
        if big
        else (dice.number(0, 99), dice.number(0, 99))
    )
    if not plus and b > a:
        a, b = b, a
    result = a + b if plus else a - b
    expression = f"{a} {'+' if plus else '-'} {b}"
    asked = _asked(dice, expression, f"{a} {'plus' if plus else 'minus'} {b}")
    thinking = f"The user wants {expression}. That is {result}."
    if not big:
        return Turn("add", asked, f"{expression} = {result}.", contains(f"= {result}."), thinking)
    answer = f"{_columns(a, b, plus)}\nThe answer is {result}."
    return Turn("add3", asked, answer, contains(f"The answer is {result}."))


def _columns(a: int, b: int, plus: bool) -> str:
    """The school method, digit by digit from the right."""
    lines, carry = [], 0
    for name, x, y in zip(("Ones", "Tens", "Hundreds"), _digits(a), _digits(b)):
        sign = "+" if plus else "-"
        value = x + y + carry if plus else x - y - carry
        carried = f" {sign} {carry}" if carry else ""
        line = f"{name}: {x} {sign} {y}{carried} = {value}, write {value % 10}"
        carry = int(value > 9 or value < 0)
        lines.append(line + (f", {'carry' if plus else 'borrow'} 1." if carry else "."))
    return "\n".join(lines)


def _digits(number: int) -> list[int]:
    return [number // 10**place % 10 for place in range(3)]


def product(dice: Dice) -> Turn:
    """A small product or quotient, or one of two digits in steps."""
    kind = dice.random()
    a, b = dice.number(2, 12), dice.number(2, 12)
    if kind < 0.4:
        asked = _asked(dice, f"{a} * {b}", dice.pick((f"{a} times {b}", f"{a} multiplied by {b}")))
        right = contains(f"= {a * b}.")
        return Turn("mul", asked, f"{a} * {b} = {a * b}.", right, f"{a} times {b} is {a * b}.")
    if kind < 0.7:
        asked = _asked(dice, f"{a * b} / {b}", f"{a * b} divided by {b}")
        return Turn("div", asked, f"{a * b} / {b} = {a}.", contains(f"= {a}."))
    a, b = dice.number(12, 99), dice.number(2, 9)
    tens, ones = a // 10 * 10, a % 10
    asked = _asked(dice, f"{a} * {b}", f"{a} times {b}")
    asked += dice.pick(("", " Show the steps.", " Step by step.")) if asked[-1] in ".?" else ""
    steps = f"{tens} * {b} + {ones} * {b} = {tens * b} + {ones * b} = {a * b}."
    return Turn("mul2", asked, f"{a} * {b} = {steps}", contains(f"= {a * b}."))


def comparison(dice: Dice) -> Turn:
    """The larger or smaller of two or three numbers."""
    larger = dice.chance(0.5)
    numbers = dice.sample(range(1, 1000), dice.pick((2, 2, 3)))
    best = max(numbers) if larger else min(numbers)
    listed = ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
    ends = "largest" if larger else "smallest"
    words = {"largest": ("larger", "bigger", "greater"), "smallest": ("smaller", "lower", "less")}
    word = ends if len(numbers) > 2 else dice.pick(words[ends])
    asked = question(
        dice,
        dice.pick(
            (
                f"which is {word}, {listed}",
                f"which number is {word}: {listed}",
                f"what is {word}: {listed}",
            )
        ),
    )
    answer = f"{best} is the {ends if len(numbers) > 2 else 'larger' if larger else 'smaller'} one."
    return Turn("compare", asked, answer, contains(f"{best} is the"))


def units(dice: Dice) -> Turn:
    """A conversion between two units."""
    source, target, factor, one = dice.pick(UNITS)
    count = dice.number(2, 12)
    if dice.chance(0.5):
        asked = request(
            dice,
            dice.pick(
                (
                    f"convert {count} {source} to {target}",
                    f"express {count} {source} in {target}",
                    f"turn {count} {source} into {target}",
                )
            ),
        )
    else:
        asked = question(
            dice,
            dice.pick(
                (
                    f"how many {target} are in {count} {source}",
                    f"how many {target} are {count} {source}",
                    f"what are {count} {source} in {target}",
                )
            ),
        )
    total = count * factor
    steps = f"{count} {source} = {count} * {factor} = {total} {target}"
    answer = f"1 {one} is {factor} {target}, so {steps}."
    return Turn("units", asked, answer, contains(f"= {total} {target}."))


def counting(dice: Dice) -> Turn:
    """Numbers in a row, up, down or in steps."""
    kind = dice.random()
    if kind < 0.5:
        first = dice.number(1, 60)
        numbers = list(range(first, first + dice.number(4, 25)))
        text = dice.pick(
            ("count from {} to {}", "count up from {} to {}", "write the numbers from {} to {}")
        )
        asked = text.format(numbers[0], numbers[-1])
    elif kind < 0.75:
        step, count = dice.pick((2, 3, 4, 5, 10)), dice.number(4, 12)
        numbers = [step * i for i in range(1, count + 1)]
        asked = dice.pick(
            (
                f"list the first {count} multiples of {step}",
                f"give me the first {count} multiples of {step}",
            )
        )
    else:
        first = dice.number(8, 40)
        numbers = list(range(first, max(0, first - dice.number(4, 15)), -1))
        text = dice.pick(("count down from {} to {}", "count backwards from {} to {}"))
        asked = text.format(numbers[0], numbers[-1])
    answer = ", ".join(map(str, numbers))
    return Turn("count", request(dice, asked), answer, exactly(answer))
