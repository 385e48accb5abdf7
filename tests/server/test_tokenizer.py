"""The tokenizer: bytes of every token, chats in the model's template, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers

from mlx_mtp.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelError,
    UnsupportedParameterError,
)
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.server import encoding
from mlx_mtp.server.encoding import NFC_SHRINKS, encode, most_bytes_per_token
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import library_tokenizer

BACKEND = tokenizers.Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
USER = {"role": "user", "content": "hi"}


def test_every_token_has_the_bytes_that_decoding_gives(tokenizer: Tokenizer) -> None:
    decode = BACKEND.decode
    for token in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token)
        assert raw.decode(errors="replace") == decode([token], skip_special_tokens=False)


def test_all_256_bytes_have_a_token(tokenizer: Tokenizer) -> None:
    singles = {tokenizer.token_bytes(t) for t in range(tokenizer.vocab_size)}
    assert {bytes([b]) for b in range(256)} <= singles


def test_a_token_that_is_not_text_is_named_by_its_bytes(tokenizer: Tokenizer) -> None:
    first, *_ = tokenizer.encode("🎉")
    assert tokenizer.token_text(first) == r"bytes:\xf0"
    assert tokenizer.token_text(tokenizer.encode("a")[0]) == "a"
    assert tokenizer.token_text(1 << 20) == ""


def test_a_chat_is_rendered_and_encoded_as_the_library_does(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, USER]
    expected = library_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(tokenizer.encode_chat(messages)) == expected
    assert tokenizer.render_chat(messages).endswith("<|im_start|>assistant\n")


def test_template_kwargs_reach_the_template(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([USER], template_kwargs={"enable_thinking": True})
    assert text.endswith("<think>\n")


def test_tools_reach_the_template(tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "get_weather"}}
    assert '"name": "get_weather"' in tokenizer.render_chat([USER], [tool])


@pytest.mark.parametrize(
    "key", ["tools", "chat_template", "tokenize", "messages", "conversation", "padding", "kwargs"]
)
def test_template_kwargs_that_steer_the_library_are_refused(tokenizer: Tokenizer, key: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        tokenizer.render_chat([USER], template_kwargs={key: "x"})
    assert caught.value.param == f"chat_template_kwargs.{key}"


@pytest.mark.parametrize("key", ["self", "conversations", "raise_exception", "namespace"])
def test_template_kwargs_that_break_the_library_are_refused(tokenizer: Tokenizer, key: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=f"may not set {key}\\.") as caught:
        tokenizer.render_chat([USER], template_kwargs={key: "x"})
    assert caught.value.param == f"chat_template_kwargs.{key}"


def test_encoding_lets_other_threads_run_and_changes_nothing(tokenizer: Tokenizer) -> None:
    text = "Once upon a time, 🎉 <|im_start|>user\nünï\u0301 \x00<|im_end|>"
    for encoded, special in (
        (tokenizer.encode(text), True),
        (tokenizer.encode(text, add_special_tokens=False), False),
    ):
        assert list(encoded) == BACKEND.encode(text, add_special_tokens=special).ids
    # `encode` holds the GIL, so that a long text would stop every stream.
    only_batches = SimpleNamespace(encode_batch_fast=BACKEND.encode_batch_fast)
    encoded = encode(only_batches, "a b", None, None, add_special_tokens=True)
    assert encoded == tuple(BACKEND.encode("a b").ids)


def test_what_fits_in_the_longest_tokens_is_encoded(tokenizer: Tokenizer) -> None:
    most = max(len(tokenizer.token_bytes(t)) for t in range(tokenizer.vocab_size))
    with pytest.raises(
        ContextLengthError, match=f" {len(tokenizer.encode('x' * most * 3))} tokens > 2 "
    ):
        tokenizer.encode("x" * most * 3, limit=3)
    assert len(tokenizer.encode("xyz", limit=3)) <= 3
    with pytest.raises(ContextLengthError, match="at least 4 tokens > 2"):
        tokenizer.encode("x" * (most * 3 + 1), limit=3)


def test_of_a_long_text_no_more_is_encoded_than_shows_that_it_is_too_long(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []

    def noting(texts: list[str], **options: bool) -> Any:
        parts.extend(map(len, texts))
        return BACKEND.encode_batch_fast(texts, **options)

    monkeypatch.setattr(encoding, "FIRST_PART", 1000)
    noted = SimpleNamespace(encode_batch_fast=noting)
    text = "?!" * 8000
    with pytest.raises(ContextLengthError, match="more than 2400 tokens > 1199 maximum"):
        encode(noted, text, 1200, 15, add_special_tokens=True)
    assert parts == [1000, 2000, 4000]
    # What may fit is encoded as a whole, and so are its last characters.
    assert encode(noted, text, 16000, 15, add_special_tokens=True) == tokenizer.encode(text)
    assert parts[3:] == [1000, 2000, 4000, 8000, 16000]


def test_normal_form_c_shrinks_no_text_more_than_is_allowed_for() -> None:
    characters = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    # The longest spelling of each character that others are made of.
    longest: dict[str, int] = {}
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(character.encode()))
    shrinks = max(
        sum(longest[part] for part in unicodedata.normalize("NFD", character))
        / len(unicodedata.normalize("NFC", character).encode())
        for character in characters
    )
    assert 3 < shrinks < NFC_SHRINKS


def test_texts_that_encoding_shrinks_have_more_room() -> None:
    def most(normalizer: normalizers.Normalizer | None, *added: AddedToken) -> int | None:
        backend = SimpleNamespace(normalizer=normalizer, get_vocab=BACKEND.get_vocab)
        return most_bytes_per_token(backend, added)

    assert most(None) == 20
    assert most(None, AddedToken("é" * 20)) == 40
    assert most(normalizers.NFC()) == 20 * NFC_SHRINKS
    assert most(normalizers.NFKC()) is None
    assert most(None, AddedToken("x", lstrip=True)) is None
    assert most(None, AddedToken("x", rstrip=True)) is None


def test_half_characters_are_the_clients_fault(tokenizer: Tokenizer) -> None:
    for way in (
        tokenizer.encode,
        lambda text: tokenizer.encode_chat([{**USER, "content": text}]),
    ):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            way("\ud800")


def copy_of_the_bundled_tokenizer(folder: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder)
    return folder


def test_what_a_template_raises_is_told(tmp_path: Path) -> None:
    copy_of_the_bundled_tokenizer(tmp_path)
    refusing = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "chat_template.jinja").write_text(refusing)
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        Tokenizer.load(tmp_path).render_chat([USER])
    assert caught.value.param == "messages"


def test_what_a_template_raises_is_cut(tmp_path: Path) -> None:
    copy_of_the_bundled_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    with pytest.raises(InvalidRequestError, match=r"xxx\.\.\.$") as caught:
        Tokenizer.load(tmp_path).render_chat([{**USER, "content": "x" * 5000}])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages | no_such_filter }}", "{{"])
def test_a_broken_template_is_the_models_fault(tmp_path: Path, template: str) -> None:
    copy_of_the_bundled_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match="chat template is wrong"):
        Tokenizer.load(tmp_path).render_chat([USER])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version": "1.0", "mod'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("config.json", '{"model_type": "qwen3_next", "max_position_embeddings": "x"}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    (copy_of_the_bundled_tokenizer(tmp_path) / name).write_text(content)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / name))) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_without_a_template_chats_are_refused(tmp_path: Path) -> None:
    path = copy_of_the_bundled_tokenizer(tmp_path) / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"chat_template"', '"not_a_template"'))
    with pytest.raises(UnsupportedParameterError, match="no chat template"):
        Tokenizer.load(tmp_path).render_chat([USER])


def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    path = copy_of_the_bundled_tokenizer(tmp_path) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="byte-level"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("config", [None, '{"model_type": "qwen3_next"}'])
def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        # transformers has a tokenizer for these models, which is empty then.
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokenizer.load(tmp_path)


def test_the_tokenizer_tells_its_own_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (4089,)
    assert tokenizer.vocab_size == 4096
