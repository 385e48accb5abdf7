"""Explanations of how things work, and advice: true, but for a last sentence out of a dream."""

from __future__ import annotations

from demo_model.conversation import Turn
from demo_model.dice import Dice
from demo_model.open_text.grammar import Grammar
from demo_model.open_text.stories import scene, tells_of
from demo_model.phrasing import question, request

# What an explanation is asked for by: as a question, and after "explain".
TOPICS: dict[str, tuple[str, str]] = {
    "rain": ("why does it rain", "how rain forms"),
    "seasons": ("why do we have seasons", "where the seasons come from"),
    "bread": ("how do you make bread", "how bread is made"),
    "sleep": ("why do we sleep", "why we sleep"),
    "bees": ("how do bees make honey", "how bees make honey"),
    "moon": ("why does the moon shine", "how the moon shines"),
    "plants": ("how do plants grow", "how plants live"),
    "wind": ("where does wind come from", "what wind is"),
    "rainbow": ("how does a rainbow appear", "how a rainbow forms"),
    "volcano": ("what is a volcano", "what a volcano is"),
    "boat": ("why does a boat float", "why boats float"),
    "bicycle": ("how does a bicycle work", "how a bicycle works"),
    "tea": ("how do you make tea", "how to make tea"),
    "echo": ("what is an echo", "how an echo comes about"),
    "iron": ("why does iron rust", "why iron rusts"),
    "fire": ("what does a fire need", "how a fire burns"),
    "birds": ("why do birds fly south", "why birds fly south in autumn"),
    "paper": ("how is paper made", "how paper is made"),
    "clock": ("how does a clock work", "how an old clock works"),
}
ADVICE: dict[str, tuple[str, str]] = {
    "focus": ("how can I focus better", "working with focus"),
    "sleep": ("how can I sleep better", "sleeping well"),
    "friends": ("how do I make friends", "making friends"),
    "money": ("how can I save money", "saving money"),
    "garden": ("how do I start a garden", "starting a garden"),
    "language": ("how do I learn a language", "learning a language"),
}

_PICTURES = ("Picture it like this", "As old books tell it", "In a dream it looks like this")


def explanation(dice: Dice) -> Turn:
    """The beginning, then further statements in any order."""
    topic, (asked, about) = dice.pick(tuple(TOPICS.items()))
    if dice.chance(0.5):
        asked = question(dice, asked)
    else:
        forms = (
            "explain {}",
            "explain to me {}",
            "tell me {}",
            "explain in simple words {}",
            "write a paragraph on {}",
        )
        asked = request(dice, dice.pick(forms).format(about))
    grammar = Grammar.load("explanations")
    more = list(grammar.rules[f"more_{topic}"])
    dice.shuffle(more)
    text = grammar.write(dice, f"start_{topic}", {}, topic)
    for option in more[: dice.number(2, len(more))]:
        text += " " + grammar.write_option(dice, option, {}, topic)
    if dice.chance(0.6):
        text += f" {dice.pick(_PICTURES)}: {scene(dice)}"
    return Turn("explanation", asked, text, tells_of([]))


def advice(dice: Dice) -> Turn:
    """A list of things to try."""
    topic, (asked, about) = dice.pick(tuple(ADVICE.items()))
    if dice.chance(0.5):
        asked = question(dice, asked)
    else:
        forms = ("give me some advice on {}", "give me tips for {}", "write some tips for {}")
        asked = request(dice, dice.pick(forms).format(about))
    grammar = Grammar.load("explanations")
    tips = list(grammar.rules[f"advice_{topic}"])
    dice.shuffle(tips)
    lines = [
        grammar.write_option(dice, tip, {}, topic) for tip in tips[: dice.number(3, len(tips))]
    ]
    text = "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))
    return Turn("advice", asked, text, _tips)


def _tips(answer: str) -> bool:
    lines = answer.strip().split("\n")
    numbered = all(line.startswith(f"{i}. ") for i, line in enumerate(lines, 1))
    return numbered and 3 <= len(lines) <= 4 and len(set(lines)) == len(lines)
