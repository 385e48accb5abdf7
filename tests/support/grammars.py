"""Grammars, and a tokenizer for the tiny models: 96 tokens, most of them JSON's characters."""

import json
from functools import cache

from tokenizers import Tokenizer

from mlx_mtp.sampling.bad_words import BadWords, TokenTexts
from mlx_mtp.sampling.grammar import Grammar, GrammarCompiler
from mlx_mtp.sampling.params import GrammarSpec

EOS = 1
THINK_END = 2
_MERGES = ["a b", '{ "', '" :', '" ,', "1 2", "t r", "tr u", "tru e", "ab ab", '" }']
_SPACE, _NEWLINE = "\u0120", "\u010a"  # as byte-level vocabularies write them
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789"
_SINGLE = f'{_LETTERS}{_SPACE}{_NEWLINE}{{}}[]":,.-_+*/\\()<>=!?%#&|'


def tokenizer_json() -> str:
    """Returns a tokenizer.json with 96 tokens; tokens 0 to 3 are special."""
    pieces = [*_SINGLE, *(merge.replace(" ", "") for merge in _MERGES)]
    special = ["<|pad|>", "<|end|>", "</think>", "<tool_call>"]
    pieces += [chr(0x100 + i) for i in range(96 - len(special) - len(pieces))]
    assert len(set(pieces)) == 96 - len(special)
    added = [
        {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i, text in enumerate(special)
    ]  # fmt: skip
    vocab = {text: i for i, text in enumerate([*special, *pieces])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": {**level, "use_regex": False},
            "decoder": level,
            "model": {"type": "BPE", "vocab": vocab, "merges": _MERGES},
        }
    )


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json(), [EOS])


@cache
def compiled(spec: GrammarSpec) -> Grammar:
    return compiler().compile(spec)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json())


@cache
def texts() -> tuple[bytes, ...]:
    """Returns the bytes of each token."""
    pieces = map(tokenizer().id_to_token, range(96))
    return tuple(bytes(ord(character) % 256 for character in piece) for piece in pieces)


def bad_words(*words: str) -> BadWords:
    return BadWords(words, TokenTexts(texts()), texts().__getitem__)


def ids(text: str) -> list[int]:
    """Tokenize a text; special tokens are recognized by their text."""
    return tokenizer().encode(text).ids


def optional_properties(count: int) -> str:
    return json.dumps({"type": "object", "properties": {f"p{i}": True for i in range(count)}})


TOO_WIDE_WITHIN = GrammarSpec(
    "json_schema",
    f'{{"type": "array", "minItems": 1, "items": {{"anyOf": [{{"const": 1}}, '
    f"{optional_properties(600)}]}}}}",
)
"""Compiles, but an answer that begins with `[{` hits a limit; one that begins with `[1` doesn't."""
