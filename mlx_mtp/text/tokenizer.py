"""A model's own tokenizer: converts text and chats to token ids, and token ids to bytes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes

from mlx_mtp.bounded_json import shortened
from mlx_mtp.engine.request import prompt_too_long
from mlx_mtp.errors import (
    InvalidRequestError,
    ModelError,
    UnsupportedParameterError,
    is_fault,
)
from mlx_mtp.models.files import check_tokenizer
from mlx_mtp.sampling.bad_words import BadWords, TokenTexts

TemplateMessage = dict[str, Any]

MIN_PART, MAX_PART = 1 << 14, 1 << 20
"""Bounds of the part of a long text that is encoded first, in characters (16 per token of the
limit). The part is doubled until it exceeds the limit or is the whole text, as encoding 8 MB can
take 20 s and 1.6 GB of memory."""
_MAX_TEMPLATE_WORDS = 300
_FILL_IN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")  # Qwen's
_VOCABULARIES = ("tokenizer.json", "vocab.json")
# Names that jinja2 and transformers define for every template; other values would break it.
_TEMPLATE_GLOBALS = frozenset(
    {"self", "messages", "kwargs", "raise_exception", "strftime_now", "namespace", "range", "dict"}
)
# Without trust_remote_code, transformers asks on the terminal whether to run a model's own code;
# with False, it uses its own class or refuses.
_SAFELY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols"])
_ENVIRONMENT.globals.clear()  # The globals' names count as variables too.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # a tag that transformers adds
_WORD = re.compile(r"\w+")


class Tokenizer:
    """A byte-level BPE tokenizer of the `transformers` library; thread-safe."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        added = tokenizer.added_tokens_decoder
        self._special = frozenset(index for index, token in added.items() if token.special)
        # Ids of the tokens that were added to the vocabulary, by text.
        self.added_tokens = {token.content: index for index, token in added.items()}
        self._byte_of = _byte_level_alphabet()
        template = tokenizer.chat_template
        if isinstance(template, dict):  # Some models have several.
            template = "\n".join(template.values())
        self.template: str = template or ""
        decoder = None if self._backend is None else self._backend.decoder
        if decoder is None or json.loads(decoder.__getstate__())["type"] != "ByteLevel":
            raise ModelError(
                f"{source}: only byte-level BPE tokenizers (tokenizer.json) are served."
            )

    @classmethod
    def load(cls, path: Path, template: str | None = None) -> Tokenizer:
        """Read the tokenizer in a model's directory; raises ModelError if there is no usable one.

        `template` replaces the model's own chat template.
        """
        # Without these files, transformers makes an empty tokenizer for some types of model.
        if not any((path / name).is_file() for name in _VOCABULARIES):
            raise ModelError(
                f"{path} has no tokenizer: there is no {' and no '.join(_VOCABULARIES)}."
            )
        check_tokenizer(path)
        from transformers import AutoTokenizer  # The import takes seconds.

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path), **_SAFELY)
        except Exception as error:
            # Whatever the library raises, these files can't be used.
            file = _damaged_file(path)
            fault = (
                f"{file} can't be used" if file else f"{path} has no tokenizer that can be loaded"
            )
            raise ModelError(f"{fault}: {_one_line(error)}") from error
        if template is not None:
            tokenizer.chat_template = template
        loaded = cls(tokenizer, str(path))
        try:
            _syntax_of(loaded.template)
        except (TemplateSyntaxError, RecursionError) as error:
            which = f"{path}: the" if template is None else "The given"
            raise ModelError(f"{which} chat template is wrong: {_one_line(error)}") from error
        return loaded

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids; the model's vocabulary can be larger, as it can be padded."""
        return len(self._tokenizer)

    @property
    def hidden_names(self) -> list[str]:
        """Names of tokens that a mark can't keep a text from becoming (`text/plain_text.py`).

        A normalizer can turn other characters into a name, such as `＜` into `<`; a name of one
        character can't be divided by a mark.
        """
        normalizes = self._backend.normalizer is not None
        added = self._tokenizer.added_tokens_decoder.values()
        return [t.content for t in added if len(t.content) < 2 or (normalizes and t.normalized)]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (eos,)

    def to_json(self) -> str:
        """Returns the text of tokenizer.json, including the tokens that other files add."""
        return str(self._backend.to_str())

    def encode(
        self,
        text: str,
        *,
        limit: int | None = None,
        add_special_tokens: bool = True,
        mark: str | None = None,
        param: str | None = None,
    ) -> tuple[int, ...]:
        """Returns the token ids of a text. Raises InvalidRequestError if it can't be encoded.

        Raises ContextLengthError for more than `limit` tokens, without encoding a long text whole.
        The parts of the text between occurrences of `mark` are encoded separately. `param`, the
        request's field, is used only by `TextWorkers.encode`, which names it in errors.
        """
        size = len(text) if limit is None else min(max(16 * limit, MIN_PART), MAX_PART)
        while True:
            try:
                # Unlike `encode`, this lets other threads run and computes no offsets.
                parts = self._backend.encode_batch_fast(
                    text[:size].split(mark) if mark else [text[:size]],
                    add_special_tokens=add_special_tokens,
                )
            except BaseException as error:
                if not is_fault(error):
                    raise
                half = isinstance(error, TypeError)
                why = "it has half of a surrogate pair." if half else _one_line(error)
                raise InvalidRequestError(f"The prompt can't be encoded: {why}") from error
            whole = size >= len(text)
            ids = [token for part in parts for token in part.ids]
            # The text that follows can merge tokens at a part's end, but not halve their number.
            if limit is not None and len(ids) > (limit if whole else 2 * limit):
                count = len(ids) if whole else f"more than {2 * limit}"
                raise prompt_too_long(count, limit)
            if whole:
                return tuple(ids)
            size *= 2

    def fill_in(self, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        """Returns the prompt for the text between two texts, in Qwen's fill-in-the-middle format.

        Raises UnsupportedParameterError if the tokenizer lacks the format's tokens.
        """
        ids = [self.added_tokens.get(name) for name in _FILL_IN]
        if None in ids:
            raise UnsupportedParameterError(
                f"suffix: this model has no token {_FILL_IN[ids.index(None)]}.", param="suffix"
            )
        begin, end, middle = (index for index in ids if index is not None)
        return (begin, *before, end, *after, middle)

    def encode_chat(
        self, messages: Sequence[TemplateMessage], *, limit: int | None = None
    ) -> tuple[int, ...]:
        """Returns a chat's token ids by the model's own template, up to the answer's beginning."""
        return self.encode(self.render_chat(messages), limit=limit, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        template: str | None = None,
        generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> str:
        """Returns the chat's text by the model's template or a client's, run in Jinja's sandbox.

        If `continue_final`, the last message is the beginning of the answer. Raises RequestError
        if the template refuses the chat or one of `template_kwargs` is not allowed.
        """
        if not (template or self.template):
            raise UnsupportedParameterError(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        extra = dict(template_kwargs or {})
        for name in sorted(self.closed_kwargs.intersection(extra)):
            raise UnsupportedParameterError(
                f"chat_template_kwargs may not set {name}.", param=f"chat_template_kwargs.{name}"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=template,
                add_generation_prompt=generation_prompt and not continue_final,
                continue_final_message=continue_final,
                tokenize=False,
                **extra,
            )
        except TemplateSyntaxError as error:
            if template is not None:
                raise InvalidRequestError(
                    f"chat_template is wrong: {_one_line(error)}", param="chat_template"
                ) from error
            raise ModelError(f"The model's chat template is wrong: {_one_line(error)}") from error
        except Exception as error:
            # Whatever a template raises, it can't render these messages.
            whose = "The model's" if template is None else "The request's"
            raise InvalidRequestError(
                f"{whose} chat template refuses these messages: "
                f"{shortened(str(error), _MAX_TEMPLATE_WORDS)}",
                param="messages" if template is None else "chat_template",
            ) from error
        return str(text)

    def variables(self, template: str | None = None) -> frozenset[str]:
        """Returns the variables of the model's chat template, or of `template` if given."""
        return variables(template or self.template)

    @cached_property
    def closed_kwargs(self) -> frozenset[str]:
        """Names of `template_kwargs` that are refused: they would control or break transformers."""
        from transformers.utils.chat_template_utils import render_jinja_template

        steps = (self._tokenizer.apply_chat_template, render_jinja_template)
        return _TEMPLATE_GLOBALS.union(*(inspect.signature(step).parameters for step in steps))

    def text_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to an answer's text; none for a special token."""
        return b"" if token_id in self._special else self.token_bytes(token_id)

    def bad_words(self, words: Sequence[str], shown: Callable[[int], bytes]) -> BadWords:
        """Returns words that an answer must not contain, for the sampler; takes 1 s at first."""
        return BadWords(words, self._token_texts, shown)

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(list(map(self.token_bytes, range(self.vocab_size))))

    def text_bytes_with(self, markers: Iterable[str]) -> Callable[[int], bytes]:
        """Returns a variant of `text_bytes` for which the special tokens `markers` are text."""
        hidden = self._special - {self.added_tokens.get(marker) for marker in markers}
        return lambda token: b"" if token in hidden else self.token_bytes(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's bytes, which may not be valid UTF-8; b"" for an unused id.

        The bytes of a special token are its name.
        """
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        try:
            return bytes(self._byte_of[character] for character in piece)
        except KeyError:
            # An added token with characters outside the byte alphabet is plain text.
            return piece.encode()

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, special tokens included."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        """Returns a token's text; OpenAI's form `bytes:\\xe2\\x82` if it is not valid UTF-8."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _syntax_of(template: str) -> nodes.Template:
    # Parse only: compiling would compute constants such as 7 ** 10**8.
    return _ENVIRONMENT.parse(_GENERATION.sub("", template))


class _Tracker(meta.TrackingCodeGenerator):
    """Tracks variables as Jinja's `find_undeclared_variables` does, but computes no constants."""

    def __init__(self) -> None:
        super().__init__(_ENVIRONMENT)
        self.optimizer = None

    def _output_child_to_const(self, *_: object) -> NoReturn:
        raise nodes.Impossible


@lru_cache(maxsize=16)
def variables(template: str) -> frozenset[str]:
    """Returns the names that a template reads and may not have set before.

    A hostile template of 64 KB takes seconds.
    """
    tracker = _Tracker()
    try:
        tracker.visit(_syntax_of(template))
    except (TemplateError, RecursionError):
        return frozenset(_WORD.findall(template))  # Rendering will report the error.
    return frozenset(tracker.undeclared_identifiers)


def _one_line(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()), _MAX_TEMPLATE_WORDS)


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte of each character of a byte-level vocabulary (GPT-2's bytes_to_unicode).

    Printable bytes are their own characters; the other bytes are characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return alphabet | {chr(byte): byte for byte in printable}


def _damaged_file(path: Path) -> Path | None:
    """Returns the first of a directory's files that can't be read, if any."""
    from tokenizers import Tokenizer as Backend
    from transformers import AutoConfig

    readers: dict[str, Callable[[Path], Any]] = {
        "tokenizer.json": lambda file: Backend.from_file(str(file)),
        "tokenizer_config.json": lambda file: json.loads(file.read_text("utf-8")).items(),
        "config.json": lambda file: AutoConfig.from_pretrained(str(file.parent), **_SAFELY),
    }
    for name, read in readers.items():
        try:
            if (path / name).exists():
                read(path / name)
        except Exception:
            return path / name
    return None
