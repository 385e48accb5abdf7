"""A model's own tokenizer: text and chats to token ids, and token ids to bytes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_mtp.errors import InvalidRequestError, ModelError, UnsupportedParameterError

Message = dict[str, Any]


class Tokenizer:
    """A byte-level BPE tokenizer of the `transformers` library, as all Qwen models have.

    Its methods may be called from several threads.

    Args:
        tokenizer: what `AutoTokenizer.from_pretrained` returned.
        source: what to call it in errors.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        added = tokenizer.added_tokens_decoder
        self._special = frozenset(index for index, token in added.items() if token.special)
        self._byte_of = _byte_level_alphabet()
        if self._backend is None or not _is_byte_level(self._backend):
            raise ModelError(
                f"{source}: only byte-level BPE tokenizers (tokenizer.json) are served."
            )

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read the tokenizer in a model's directory.

        Raises:
            ModelError: there is none, or it isn't a byte-level BPE.
        """
        # Imported here: it takes seconds.
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ModelError(f"{path} has no tokenizer that can be loaded: {error}") from error
        return cls(tokenizer, str(path))

    @cached_property
    def vocab_size(self) -> int:
        """Ids are below this; the model's own vocabulary may be padded beyond it."""
        return len(self._tokenizer)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What the tokenizer itself says ends an answer; a model's configuration may name more."""
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (eos,)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a plain prompt, with what the tokenizer itself puts before it."""
        return tuple(self._backend.encode(text).ids)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a chat in the model's own template, up to where the answer begins."""
        text = self.render_chat(messages, tools, template_kwargs)
        # The template has written the special tokens itself.
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as the model's template writes it.

        Raises:
            InvalidRequestError: the template refuses these messages; its own words are given.
            UnsupportedParameterError: there is no template, or a template_kwargs key is not open.
        """
        if not self._tokenizer.chat_template:
            raise UnsupportedParameterError(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        extra = dict(template_kwargs or {})
        for key in sorted(self._closed_kwargs & extra.keys()):
            raise UnsupportedParameterError(
                f"chat_template_kwargs may not set {key}.", param=f"chat_template_kwargs.{key}"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **extra,
            )
        except Exception as error:
            # A template is the model's program and the messages its input: whatever it raises,
            # jinja2's errors or Python's, says that they don't go together.
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)

    @cached_property
    def _closed_kwargs(self) -> frozenset[str]:
        named = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset(named) | {"messages", "kwargs"}

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to an answer's text: none for a special token."""
        return b"" if token_id in self._special else self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, which need not be valid UTF-8; a special token's name."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        try:
            return bytes(self._byte_of[character] for character in piece)
        except KeyError:
            # An added token with characters outside of the byte alphabet stands for itself.
            return piece.encode()

    def token_text(self, token_id: int) -> str:
        """A token as text, in OpenAI's form `bytes:\\xe2\\x82` where it is not valid UTF-8."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _is_byte_level(backend: Any) -> bool:
    if backend.decoder is None:
        return False
    return bool(json.loads(backend.decoder.__getstate__())["type"] == "ByteLevel")


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, to that byte.

    Printable bytes stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet
