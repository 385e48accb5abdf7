"""Copying and changing given text."""

from __future__ import annotations

from demo_model.conversation import Turn, exactly
from demo_model.dice import Dice
from demo_model.open_text.filler import sentence
from demo_model.phrasing import request
from demo_model.tasks.changes import changed_text
from demo_model.words import ALL_WORDS


def _quoted(dice: Dice, text: str) -> str:
    return dice.pick((f" {text}", f" {text}", f"\n\n{text}", f' "{text}"', f"\n{text}"))


def _sentences(dice: Dice, low: int, high: int) -> list[str]:
    return [sentence(dice) for _ in range(dice.number(low, high))]


def copy(dice: Dice) -> Turn:
    """The same again."""
    text = " ".join(_sentences(dice, 1, 4))
    forms = (
        "repeat this text exactly:",
        "copy this text:",
        "write this again, word for word:",
        "repeat after me:",
        "say this back to me:",
        "echo the following text:",
    )
    return Turn("copy", request(dice, dice.pick(forms) + _quoted(dice, text)), text, exactly(text))


def replace_word(dice: Dice) -> Turn:
    """One word for another."""
    text = " ".join(_sentences(dice, 1, 3))
    words = sorted(
        {w for w in (word.strip(".,!?") for word in text.split()) if w.isalpha() and len(w) > 3}
    )
    old, new = dice.pick(words or ["the"]), dice.pick(ALL_WORDS)
    changed = " ".join(
        w.replace(old, new) if w.strip(".,!?") == old else w for w in text.split(" ")
    )
    forms = (
        f'replace the word "{old}" with "{new}" in this text:',
        f'change "{old}" to "{new}":',
        f'in this text, put "{new}" in place of "{old}":',
        f'swap the word "{old}" for "{new}":',
    )
    return changed_text(dice, "edit", forms, text, changed)


def upper_case(dice: Dice) -> Turn:
    """In capitals."""
    text = sentence(dice)
    forms = (
        "write this in capital letters:",
        "put this in upper case:",
        "convert this text to uppercase:",
        "write this in all caps:",
    )
    return changed_text(dice, "upper", forms, text, text.upper())


def lower_case(dice: Dice) -> Turn:
    """In small letters."""
    text = sentence(dice)
    forms = (
        "write this in small letters:",
        "put this in lower case:",
        "convert this text to lowercase:",
    )
    return changed_text(dice, "lower", forms, text.upper(), text.lower())


def bullets(dice: Dice) -> Turn:
    """A list of the sentences."""
    sentences = _sentences(dice, 2, 5)
    numbered = dice.chance(0.3)
    forms = (
        "turn these sentences into a {} list:",
        "write these sentences as a {} list:",
        "make a {} list of these sentences:",
    )
    form = dice.pick(forms).format("numbered" if numbered else "bullet")
    lines = [f"{i}. {s}" if numbered else f"- {s}" for i, s in enumerate(sentences, 1)]
    answer = "\n".join(lines)
    return Turn("bullets", request(dice, f"{form} {' '.join(sentences)}"), answer, exactly(answer))


def pick_sentence(dice: Dice) -> Turn:
    """One sentence of several."""
    sentences = _sentences(dice, 3, 6)
    place, index = dice.pick((("first", 0), ("last", -1), ("second", 1)))
    forms = (
        f"give me only the {place} sentence of this text:",
        f"what is the {place} sentence here:",
        f"write the {place} sentence of this text:",
        f"quote the {place} sentence:",
    )
    asked = request(dice, f"{dice.pick(forms)} {' '.join(sentences)}")
    return Turn("pick", asked, sentences[index], exactly(sentences[index]))
