"""The tokenizer: bytes of every token, chats in the model's template, and what it refuses."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from mlx_mtp.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelError,
    UnsupportedParameterError,
)
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import library_tokenizer, tokenizer_with

BACKEND = tokenizers.Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
USER = {"role": "user", "content": "hi"}


def test_every_token_has_the_bytes_that_decoding_gives(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (4096, (4089,))
    raw = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    for token, piece in enumerate(raw):
        decoded = BACKEND.decode([token], skip_special_tokens=False)
        assert piece.decode(errors="replace") == decoded
    assert {bytes([b]) for b in range(256)} <= set(raw)
    first, *_ = tokenizer.encode("🎉")
    assert tokenizer.token_text(first) == r"bytes:\xf0"
    assert tokenizer.token_text(tokenizer.encode("a")[0]) == "a"
    assert tokenizer.token_text(1 << 20) == ""


def test_special_tokens_are_no_text_but_for_a_parsers_markers(tokenizer: Tokenizer) -> None:
    end, think = tokenizer.added_tokens["<|im_end|>"], tokenizer.added_tokens["<think>"]
    shown = tokenizer.text_bytes_with(["<|im_end|>", "no token"])
    assert (tokenizer.text_bytes(end), shown(end)) == (b"", b"<|im_end|>")
    assert tokenizer.text_bytes_with([])(end) == b""
    assert tokenizer.token_bytes(think) == b"<think>"
    assert shown(300) == tokenizer.text_bytes(300) == tokenizer.token_bytes(300) != b""


def test_a_chat_is_rendered_and_encoded_as_the_library_does(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, USER]
    expected = library_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(tokenizer.encode_chat(messages)) == expected
    assert tokenizer.render_chat(messages).endswith("<|im_start|>assistant\n")
    thinking = tokenizer.render_chat([USER], template_kwargs={"enable_thinking": True})
    assert thinking.endswith("<think>\n")
    tool = {"type": "function", "function": {"name": "get_weather"}}
    assert '"name": "get_weather"' in tokenizer.render_chat([USER], [tool])
    begun = tokenizer.render_chat(
        [USER, {"role": "assistant", "content": "I"}], continue_final=True
    )
    assert begun.endswith("assistant\nI")


def test_encoding_is_the_backends(tokenizer: Tokenizer) -> None:
    text = "Once upon a time, 🎉 <|im_start|>user\nünï\u0301 \x00<|im_end|>"
    for special in (True, False):
        expected = BACKEND.encode(text, add_special_tokens=special).ids
        assert list(tokenizer.encode(text, add_special_tokens=special)) == expected
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("\ud800")


def test_of_a_long_text_no_more_is_encoded_than_shows_that_it_is_too_long(
    tokenizer: Tokenizer,
) -> None:
    parts: list[int] = []

    def noting(texts: list[str], **options: bool) -> Any:
        parts.extend(map(len, texts))
        return BACKEND.encode_batch_fast(texts, **options)

    noted = copy.copy(tokenizer)
    # Not `encode`, which holds the GIL: a long text would stop every stream.
    noted._backend = SimpleNamespace(encode_batch_fast=noting)
    with pytest.raises(ContextLengthError, match="more than 2000 tokens > 999 maximum"):
        noted.encode("?!" * 50_000, limit=1000)
    assert parts == [16_384]
    # Text of the vocabulary's longest piece may fit, and so is encoded up to its last part.
    text = max((BACKEND.decode([i]) for i in range(4087)), key=len) * 5000
    expected = tuple(BACKEND.encode(text).ids)
    assert noted.encode(text, limit=len(expected)) == noted.encode(text) == expected
    with pytest.raises(ContextLengthError, match=f" {len(expected)} tokens > {len(expected) - 2} "):
        noted.encode(text, limit=len(expected) - 1)


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ raise_exception('x' * 5000) }}", InvalidRequestError, r"xxx\.\.\.$"),
        ("{{ messages | no_such_filter }}", ModelError, "chat template is wrong"),
        ("", UnsupportedParameterError, "no chat template"),
    ],
)
def test_templates_that_raise(template: str, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        tokenizer_with(template).render_chat([USER])
    assert len(str(caught.value)) < 400


WORD_PIECE = json.loads(BACKEND.to_str()) | {
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}
}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", '{"version": "1.0", "mod', ""),
        ("tokenizer.json", json.dumps(WORD_PIECE), "only byte-level BPE"),
        ("tokenizer_config.json", "[]", ""),
        ("config.json", '{"model_type": "qwen3_next", "max_position_embeddings": "x"}', ""),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    for each in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / each, tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message or re.escape(str(tmp_path / name))):
        Tokenizer.load(tmp_path)
