"""Compilation: what each kind of grammar accepts, where answers end, and what is refused."""

import json

import numpy as np
import pytest

from mlx_mtp.errors import GrammarError
from mlx_mtp.sampling.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS, Grammar
from mlx_mtp.sampling.params import GrammarSpec
from tests.support.grammars import (
    EOS,
    THINK_END,
    compiled,
    compiler,
    ids,
    optional_properties,
    tokenizer,
)

_SCHEMA = {"type": "object", "properties": {"ab": {"type": "integer"}}, "required": ["ab"]}
SCHEMA = GrammarSpec("json_schema", json.dumps(_SCHEMA))
_TIGHT = {"x-guidance": {"whitespace_flexible": False}}
TIGHT = GrammarSpec("json_schema", json.dumps({**_SCHEMA, **_TIGHT}))


def mask(matcher) -> set[int]:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


def accepts(grammar: Grammar, text: str) -> bool:
    """Returns True if each token is in its mask, and the end of sequence in the mask after them."""
    matcher = grammar.matcher.deep_copy()
    for token in ids(text):
        if token not in mask(matcher):
            return False
        assert matcher.consume_token(token)
    return EOS in mask(matcher)


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        (SCHEMA, '{"ab":12}', '{"ab":true}'),
        (SCHEMA, '{ "ab" : 1 }', '{"ab":1'),
        (SCHEMA, '{\n    "ab": 1\n}', '{  "ab": 1}'),
        (TIGHT, '{"ab":1}', '{ "ab":1}'),
        (GrammarSpec("json_object"), '{"a":[1,{"b":true}]}', "[1]"),
        (GrammarSpec("regex", "[ab]+(12)?"), "abab12", "abab1"),
        (GrammarSpec("regex", "^a/b$"), "a/b", "a/bb"),
        (GrammarSpec("choice", '["ab", "a\\"b", "</think>"]'), 'a"b', "a"),
        (GrammarSpec("lark", 'start: "a" B\nB: /[0-9]+/'), "a12", "a"),
        (GrammarSpec("lark", 'root ::= "a" | [b-d]+'), "bcd", "ab"),
        (GrammarSpec("regex", "[0-9]", free_until="</think>"), "{a</think>1", "{a1"),
        (GrammarSpec("regex", "[0-9]", free_until="</think>"), "</think>\n\n1", "</think>\n\n\n1"),
        (GrammarSpec("regex", "[0-9]", free_until="ab+"), "xab+1", "xab1"),
    ],
    ids=str,
)
def test_each_kind_accepts_what_it_should(spec, right, wrong):
    grammar = compiled(spec)
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


def test_the_text_of_a_special_token_stays_text():
    """llguidance's forced tokens would be the special token itself, which no string matches."""
    matcher = compiled(GrammarSpec("json_schema", '{"const": "</think>"}')).matcher.deep_copy()
    said = ""
    while EOS not in (allowed := mask(matcher)):
        token = min(allowed)
        assert token != THINK_END
        assert matcher.consume_token(token)
        said += tokenizer().decode([token])
    assert json.loads(said) == "</think>"


def test_white_space_between_the_parts_of_json_has_an_end():
    matcher = compiled(GrammarSpec("json_object")).matcher.deep_copy()
    assert matcher.consume_token(ids("{")[0])
    (space,), (newline,) = ids(" "), ids("\n")
    assert matcher.consume_token(newline)
    assert newline not in mask(matcher)
    for _ in range(40):
        assert space in mask(matcher)
        matcher.consume_token(space)
    assert space not in mask(matcher)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GrammarSpec("json_schema", '{"type": "foo"}'), "Invalid type: foo"),
        (GrammarSpec("json_schema", '{"not": {}}'), "not"),
        (GrammarSpec("json_schema", '{"$ref": "http://localhost/x"}'), "Resource"),
        (GrammarSpec("json_schema", optional_properties(600)), "items"),
        (GrammarSpec("regex", "(?=a)b"), "look-around"),
        (GrammarSpec("lark", "start: missing"), "missing"),
        (GrammarSpec("lark", 'root ::= "a'), "GBNF"),
        (GrammarSpec("lark", 'start: a "b"\na[max_tokens=3]: /[a-z]*/'), "rollback"),
        (GrammarSpec("choice", "[]"), "0 choices"),
        (GrammarSpec("choice", json.dumps(["a"] * (MAX_CHOICES + 1))), f"{MAX_CHOICES + 1}"),
        (GrammarSpec("regex", "a" * (MAX_GRAMMAR_CHARACTERS + 1)), "characters"),
        (GrammarSpec("regex", "[\\u3040-\\u309f]"), "tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_told(spec, words):
    with pytest.raises(GrammarError, match=words) as caught:
        compiler().compile(spec)
    assert len(str(caught.value)) < 500
    assert caught.value.status == 400
