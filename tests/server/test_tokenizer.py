"""The tokenizer: bytes of every token, chats in the model's template, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlx_mtp.errors import InvalidRequestError, ModelError, UnsupportedParameterError
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.server.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}


def test_every_token_has_the_bytes_that_decoding_gives(tokenizer: Tokenizer) -> None:
    decode = tokenizer._backend.decode
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
    expected = tokenizer._tokenizer.apply_chat_template(
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


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokenizer.load(tmp_path)


def test_the_tokenizer_tells_its_own_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (4089,)
    assert tokenizer.vocab_size == 4096
