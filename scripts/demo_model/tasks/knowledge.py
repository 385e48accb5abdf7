"""Facts, capitals, days and letters: things that are looked up."""

from __future__ import annotations

import string

from demo_model.conversation import Turn, contains, exactly
from demo_model.dice import Dice
from demo_model.phrasing import question, request
from demo_model.tasks.knowledge_data import CAPITALS, FACTS, OPPOSITES
from demo_model.words import ALL_WORDS, DAYS, MONTHS


def capital(dice: Dice) -> Turn:
    """A country's capital, or the country of one."""
    country, city = dice.pick(tuple(CAPITALS.items()))
    answer = f"The capital of {country} is {city}."
    thinking = f"The question is about the capital of {country}. It is {city}."
    if dice.chance(0.15):
        forms = ["{} is the capital of which country", "which country has the capital {}"]
        asked = question(dice, dice.pick(forms).format(city))
        return Turn("capital", asked, answer, contains(answer), thinking)
    if dice.chance(0.65):
        forms = [
            "what is the capital of {}",
            "which city is the capital of {}",
            "what's the capital of {}",
            "what city is {}'s capital",
        ]
        asked = question(dice, dice.pick(forms).format(country))
    else:
        forms = [
            "name the capital of {}",
            "tell me the capital city of {}",
            "give me the capital of {}",
        ]
        asked = request(dice, dice.pick(forms).format(country))
    return Turn("capital", asked, answer, contains(f"is {city}."), thinking)


def fact(dice: Dice) -> Turn:
    """One of the facts, or an opposite."""
    if dice.chance(0.25):
        pair = dice.pick(OPPOSITES)
        a, b = pair if dice.chance(0.5) else pair[::-1]
        forms = ["what is the opposite of {}", "which word is the opposite of {}"]
        answer = f"The opposite of {a} is {b}."
        return Turn(
            "fact", question(dice, dice.pick(forms).format(a)), answer, contains(f"is {b}.")
        )
    questions, answer, key = dice.pick(FACTS)
    return Turn(
        "fact",
        question(dice, dice.pick(questions)),
        answer,
        contains(key),
        f"I know this. {answer}",
    )


def days(dice: Dice) -> Turn:
    """Days and months before and after."""
    if dice.chance(0.4):
        start, count = dice.number(0, 6), dice.number(1, 6)
        later = DAYS[(start + count) % 7]
        span = f"{count} day{'s' if count > 1 else ''}"
        forms = [
            f"if today is {DAYS[start]}, what day is it in {span}",
            f"today is {DAYS[start]}, which day will it be in {span}",
        ]
        between = ", ".join(DAYS[(start + i) % 7] for i in range(1, count + 1))
        answer = f"After {DAYS[start]}: {between}. In {span} it will be {later}."
        return Turn("days", question(dice, dice.pick(forms)), answer, contains(f"be {later}."))
    names, kind = dice.pick(((DAYS, "day"), (MONTHS, "month")))
    index, after = dice.number(0, len(names) - 1), dice.chance(0.5)
    other = names[(index + (1 if after else -1)) % len(names)]
    where = "after" if after else "before"
    forms = [
        f"which {kind} comes {where} {names[index]}",
        f"what is the {kind} {where} {names[index]}",
        f"what {kind} comes {where} {names[index]}",
    ]
    answer = f"{other} comes {where} {names[index]}."
    return Turn("days", question(dice, dice.pick(forms)), answer, contains(f"{other} comes"))


def alphabet(dice: Dice) -> Turn:
    """Letters by their place."""
    letters = string.ascii_uppercase
    index = dice.number(0, 24)
    kind = dice.random()
    if kind < 0.35:
        forms = [
            "which letter comes after {}",
            "what letter follows {} in the alphabet",
            "which letter comes after {} in the alphabet",
        ]
        answer = f"{letters[index + 1]} comes after {letters[index]}."
        return Turn(
            "letters",
            question(dice, dice.pick(forms).format(letters[index])),
            answer,
            exactly(answer),
        )
    if kind < 0.65:
        forms = ["which letter comes before {}", "which letter comes before {} in the alphabet"]
        answer = f"{letters[index]} comes before {letters[index + 1]}."
        return Turn(
            "letters",
            question(dice, dice.pick(forms).format(letters[index + 1])),
            answer,
            exactly(answer),
        )
    forms = [
        "what is letter number {} of the alphabet",
        "which letter is number {} of the alphabet",
    ]
    answer = f"Letter number {index + 1} is {letters[index]}."
    return Turn(
        "letters", question(dice, dice.pick(forms).format(index + 1)), answer, exactly(answer)
    )


def spelling(dice: Dice) -> Turn:
    """A word letter by letter, with its length, or backwards."""
    word = dice.pick(ALL_WORDS)
    spelled = "-".join(word.upper())
    kind = dice.random()
    if kind < 0.33:
        forms = [
            "spell the word {}",
            "spell {}",
            "spell out the word {}",
            "spell the word {} letter by letter",
        ]
        return Turn(
            "spell", request(dice, dice.pick(forms).format(word)), spelled, exactly(spelled)
        )
    if kind < 0.66:
        forms = [
            "how many letters are in the word {}",
            "how many letters does {} have",
            "how long is the word {}",
        ]
        answer = f"{spelled}. That is {len(word)} letters."
        asked = question(dice, dice.pick(forms).format(word))
        return Turn("letters_n", asked, answer, contains(f"is {len(word)} letters."))
    backwards = word[::-1]
    forms = [
        "reverse the word {}",
        "write {} backwards",
        "spell {} backwards",
        "write the word {} in reverse",
    ]
    answer = f"{'-'.join(word)} reversed is {'-'.join(backwards)}: {backwards}"
    return Turn(
        "reverse", request(dice, dice.pick(forms).format(word)), answer, contains(f": {backwards}")
    )
