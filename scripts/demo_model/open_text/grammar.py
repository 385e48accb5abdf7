"""A small grammar language for text that branches.

A grammar file has rules, each a heading `= name` and one option a line. Within an option:

    [rule]        an option of that rule
    {x}           a value that the caller gave
    (this|that)   a choice on the spot
    a~            "a" or "an", as the next word wants

With a lean, choices lean on the choice before them and on the text's theme (see `Dice.leaning`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from demo_model import words
from demo_model.dice import Dice

_PART = re.compile(r"\(([^()]*\|[^()]*)\)|\[(\w+)\]|\{(\w+)\}")
_NESTED = re.compile(r"\([^()]*\(")
_ARTICLE = re.compile(r"\b([aA])~ (?=(.))")

LISTS: dict[str, Sequence[str]] = {
    "animal": words.ANIMALS,
    "color": words.COLORS,
    "fruit": words.FRUITS,
    "vegetable": words.VEGETABLES,
    "object": words.OBJECTS,
    "place": words.PLACES,
    "name": words.NAMES,
    "city": words.CITIES,
    "adjective": words.ADJECTIVES,
    "doing": words.VERBS_ING,
    "job": words.JOBS,
    "instrument": words.INSTRUMENTS,
    "day": words.DAYS,
    "month": words.MONTHS,
    "season": words.SEASONS,
}


class _Variable:
    def __init__(self, name: str) -> None:
        self.name = name


class _Choice:
    """Options on the spot, or a rule's."""

    def __init__(self, slot: str, rule: str | None, options: Sequence[str]) -> None:
        self.slot = slot
        self.rule = rule
        self.options = options


class Grammar:
    """Rules by name.

    Args:
        text: of a grammar file.
        name: keeps the habits of its slots apart from those of other grammars.
    """

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.rules: dict[str, list[str]] = {}
        self._parsed: dict[str, list[object]] = {}
        options: list[str] = []
        for line in text.splitlines():
            if line.startswith("= "):
                options = self.rules.setdefault(line[2:].strip(), [])
            elif line.strip():
                options.append(line.strip())
        self._check()

    @classmethod
    def load(cls, name: str) -> Grammar:
        """The file of that name beside this one, read once."""
        return _load(name)

    def write(self, dice: Dice, rule: str, values: dict[str, str], theme: str = "") -> str:
        """One text of a rule.

        Args:
            dice: its chance.
            rule: to begin with.
            values: for `{x}`.
            theme: what the text is about; choices lean on it.
        """
        return self.write_option(dice, f"[{rule}]", values, theme)

    def write_option(self, dice: Dice, option: str, values: dict[str, str], theme: str = "") -> str:
        """The same for text in this language."""
        out: list[str] = []
        self._write(dice, option, values, theme, "", out)
        return _finished("".join(out))

    def _write(
        self, dice: Dice, text: str, values: dict[str, str], theme: str, before: str, out: list[str]
    ) -> str:
        """Write an option; returns the last choice made, which the next one leans on."""
        for part in self._parts(text):
            if isinstance(part, str):
                out.append(part)
            elif isinstance(part, _Variable):
                out.append(values[part.name])
                before = values[part.name]
            else:
                assert isinstance(part, _Choice)
                options = self._options(part)
                chosen = dice.leaning(options, part.slot, f"{before}/{theme}")
                self._write(dice, chosen, values, theme, chosen, out)
                before = chosen
        return before

    def _options(self, choice: _Choice) -> Sequence[str]:
        if choice.rule is None:
            return choice.options
        return self.rules.get(choice.rule) or LISTS[choice.rule]

    def _parts(self, text: str) -> list[object]:
        found = self._parsed.get(text)
        if found is None:
            found = self._parsed[text] = list(self._parse(text))
        return found

    def _parse(self, text: str) -> list[object]:
        parts: list[object] = []
        end = 0
        for match in _PART.finditer(text):
            if match.start() > end:
                parts.append(text[end : match.start()])
            alternatives, rule, variable = match.groups()
            if variable:
                parts.append(_Variable(variable))
            elif rule:
                parts.append(_Choice(f"{self.name}.{rule}", rule, ()))
            else:
                slot = f"{self.name}:{alternatives}"
                parts.append(_Choice(slot, None, tuple(alternatives.split("|"))))
            end = match.end()
        if end < len(text):
            parts.append(text[end:])
        return parts

    def _check(self) -> None:
        """Every rule that is named exists."""
        for rule, options in self.rules.items():
            assert options, f"{self.name}: rule {rule} has no option"
            for option in options:
                assert not _NESTED.search(option), f"{self.name}: a choice within one: {option}"
                for name in re.findall(r"\[(\w+)", option):
                    assert name in self.rules or name in LISTS, f"{self.name}: no rule {name}"


@cache
def _load(name: str) -> Grammar:
    path = Path(__file__).parent / f"{name}.grammar"
    return Grammar(path.read_text(encoding="utf-8"), name)


def _finished(text: str) -> str:
    """Articles and capitals put right."""
    text = _ARTICLE.sub(lambda m: m[1] + ("n " if m[2].lower() in "aeiou" else " "), text)
    return re.sub(r"(^|[.!?] |\n)([a-z])", lambda m: m[1] + m[2].upper(), text)
