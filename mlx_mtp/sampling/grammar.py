"""Compiles a request's grammar to a matcher that knows which tokens can come next; no mlx."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from llguidance.numpy import fill_next_token_bitmask

from mlx_mtp.errors import GrammarError
from mlx_mtp.sampling.params import GrammarSpec

MAX_GRAMMAR_CHARACTERS = 256 << 10  # 2,500 real schemas are all shorter
MAX_CHOICES = 4096
# White space in JSON as common printers write it. Without a limit, small models never end it.
JSON_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,40}"

_MAX_WORDS = 400
_UNFULFILLABLE = "No text of this model's tokens fulfils it."
# Without forced text: the tokenizer would turn the string "<think>" into the special token, which
# no string matches, and the answer could not continue.
_OPTIONS = '%llguidance {"no_forcing": true}'
_AFTER_FREE = r"/\n{0,2}/"
# With these limits the worst grammars that were tried take 50 ms for a mask of 150,000 tokens and
# then fail (280 ms with llguidance's limits). 2,500 real schemas take 0.03 ms and reach no limit.
_LIMITS: dict[str, Any] = {"step_max_items": 20_000, "max_lexer_states": 50_000}
# Maximum numbers of parallel parses. Their cost is linear for a schema (500 optional properties
# need 2,000), but can be cubic for a Lark grammar.
_MAX_ITEMS = 2000
_MAX_ITEMS_OF_LARK = 500


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A limit on the tokens before the end of thinking, and how much of it is used."""

    max_tokens: int = 0  # tokens before the end is forced
    end: tuple[int, ...] = ()  # token ids of the end, which are then forced; empty: no limit
    used: int = 0  # tokens so far, including those of a forced end
    matched: int = 0  # how many tokens of the end the latest tokens match

    @property
    def over(self) -> bool:
        return self.matched == len(self.end)

    @property
    def forced(self) -> int | None:
        """The only token that is allowed next; None: any token."""
        return None if self.over or self.used < self.max_tokens else self.end[self.matched]

    def advanced(self, token: int) -> ThinkingBudget:
        """Returns the budget after one more token."""
        if self.over:
            return self
        continues = token == self.end[self.matched]
        matched = self.matched + 1 if continues else int(token == self.end[0])
        return replace(self, used=self.used + 1, matched=matched)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar. Each sequence begins with a copy of its matcher."""

    spec: GrammarSpec
    matcher: LLMatcher | None  # in its initial state; None: only the budget restricts tokens
    budget: ThinkingBudget
    num_words: int  # 32-bit words of a mask


class GrammarCompiler:
    """Compiles grammars for a tokenizer.json; end tokens are allowed where a grammar can end.

    Construction takes up to a second with the GIL held; compiling releases the GIL.
    """

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int]) -> None:
        self._eos = tuple(eos_token_ids)
        self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(self._eos))
        self._num_words = (self._tokenizer.vocab_size + 31) // 32

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile a grammar and try its first mask, which reaches some limits already.

        Raises GrammarError if either fails. Neither the time nor the depth of the stack is limited
        here: see `text.sandbox.grammar_check`.
        """
        matcher = None if spec.kind == "free" else self._matcher(spec)
        budget = ThinkingBudget()
        if spec.free_until is not None and spec.free_tokens is not None:
            end = self._tokenizer.tokenize_str(spec.free_until, parse_special=True)
            budget = ThinkingBudget(spec.free_tokens, tuple(end))
        return Grammar(spec, matcher, budget, self._num_words)

    def _matcher(self, spec: GrammarSpec) -> LLMatcher:
        if len(spec.value) > MAX_GRAMMAR_CHARACTERS:
            raise GrammarError(
                f"It has {len(spec.value)} characters; at most {MAX_GRAMMAR_CHARACTERS} "
                "are allowed."
            )
        answer = {**_llguidance_grammar(spec), "name": "answer"}
        before = rule = ""
        if spec.free_until is not None:
            # A Lark grammar itself defines what can be in between.
            before = "free" if spec.kind == "lark" else f"free {_AFTER_FREE}"
            rule = f"\n{self._free(spec.free_until)}"
        start = {"lark_grammar": f"{_OPTIONS}\nstart: {before} @answer{rule}"}
        max_items = _MAX_ITEMS_OF_LARK if spec.kind == "lark" else _MAX_ITEMS
        limits = LLParserLimits(max_items_in_row=max_items, verbose_errors=False, **_LIMITS)
        grammars = json.dumps({"grammars": [start, answer]})
        matcher = LLMatcher(self._tokenizer, grammars, log_level=0, limits=limits)
        if matcher.is_error() and spec.kind != "lark":
            # The position refers to text that llguidance generated.
            raise GrammarError(re.sub(r"^at \d+\(\d+\): ", "", str(grammar_error(matcher))))
        _raise_if_failed(matcher)
        _try_first_token(matcher.deep_copy(), self._num_words)
        return matcher

    def _free(self, until: str) -> str:
        ids = self._tokenizer.tokenize_str(until, parse_special=True)
        if len(ids) == 1 and self._tokenizer.is_special_token(ids[0]):
            others = ",".join(map(str, (ids[0], *self._eos)))
            return f"free: <[^{others}]>* <[{ids[0]}]>"
        return f"free[suffix={json.dumps(until)}]: /(?s:.*)/"


def _llguidance_grammar(spec: GrammarSpec) -> dict[str, Any]:
    if spec.kind == "lark":
        try:
            return {"lark_grammar": any_to_lark(spec.value)}
        except (GbnfToLarkError, RecursionError) as error:
            raise GrammarError(f"It can't be read as GBNF: {error}") from None
    if spec.kind == "choice":
        choices = json.loads(spec.value)
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise GrammarError(f"It has {len(choices)} choices; 1 to {MAX_CHOICES} are allowed.")
        return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))}
    if spec.kind == "regex":
        compiled = LLMatcher.grammar_from_regex(spec.value)
    else:
        schema = '{"type": "object"}' if spec.kind == "json_object" else spec.value
        options = json.loads(schema).get("x-guidance")
        # llguidance would apply a default pattern even to a schema that allows no white space.
        is_tight = isinstance(options, dict) and options.get("whitespace_flexible") is False
        compiled = LLMatcher.grammar_from_json_schema(
            schema, defaults=None if is_tight else {"whitespace_pattern": JSON_WHITESPACE}
        )
    (grammar,) = json.loads(compiled)["grammars"]
    return {key: value for key, value in grammar.items() if value is not None}


def _try_first_token(matcher: LLMatcher, num_words: int) -> None:
    """Consume a token and roll back, as drafts do; Lark's `max_tokens=` makes that fail."""
    mask = np.zeros((1, num_words), dtype=np.int32)
    fill_next_token_bitmask(matcher, mask)
    _raise_if_failed(matcher)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    if not len(allowed):
        raise GrammarError(_UNFULFILLABLE)
    if not (matcher.consume_token(int(allowed[0])) and matcher.rollback(1)):
        _raise_if_failed(matcher)


def _raise_if_failed(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise grammar_error(matcher)


def grammar_error(matcher: LLMatcher) -> GrammarError:
    """Returns the error of a failed matcher, without the lines of grammar that llguidance shows."""
    words, _, _ = matcher.get_error().partition("<non-verbose/>")
    words = re.sub(r"\n *\d+ \| .*", "", words, flags=re.DOTALL)
    words = re.sub(r'invalid regex ".*" \(in regex\): ', "", words)
    words = re.sub(r"(regex parse error: ?)\n.*\nerror: ", r"\1 ", words, flags=re.DOTALL)
    words = " ".join(words.split()) or "llguidance gives no reason"
    if words.startswith("NoExtension"):
        words = _UNFULFILLABLE
    return GrammarError(words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}...")
