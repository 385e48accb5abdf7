"""Text of any length to token ids, with little done for a text that has too many of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mlx_mtp.errors import ContextLengthError, InvalidRequestError

NFC_SHRINKS = 4
"""Unicode's normal form C makes a text shorter by less than this: U+1FBE U+0308 U+0301, 7 bytes,
becomes U+0390, 2 bytes, and nothing shrinks more."""
FIRST_PART = 1 << 20
"""Of a longer text the first so many characters are encoded by themselves, then twice as many, and
so on. 8 MB may take 20 s and 1.6 GB: a token takes some 200 bytes while it is made."""
_CERTAINLY = 2


def encode(
    backend: Any, text: str, limit: int | None, most_bytes: int | None, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Token ids of a text.

    Args:
        backend: of the tokenizers library.
        text: of any length.
        limit: most tokens; a text that certainly has more is not encoded to its end.
        most_bytes: see `most_bytes_per_token`.
        add_special_tokens: put before it what the tokenizer puts there.

    Raises:
        InvalidRequestError: the text has half of a surrogate pair.
        ContextLengthError: the text is more than `limit` tokens.
    """

    def encoded(part: str) -> Any:
        # Unlike `encode` this lets other threads run meanwhile, and leaves out the offsets.
        (found,) = backend.encode_batch_fast([part], add_special_tokens=add_special_tokens)
        return found

    try:
        size = len(text.encode())
        if limit is not None:
            if most_bytes and size > limit * most_bytes:
                raise _too_many(f"at least {-(-size // most_bytes)}", limit)
            part = FIRST_PART
            while part < len(text):
                # What follows may make fewer tokens of the part's end, but never half of them all.
                if len(encoded(text[:part])) > _CERTAINLY * limit:
                    raise _too_many(f"more than {_CERTAINLY * limit}", limit)
                part *= 2
        encoding = encoded(text)
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidRequestError(
            "The prompt can't be encoded: it has half of a surrogate pair."
        ) from error
    if limit is not None and len(encoding) > limit:
        raise _too_many(str(len(encoding)), limit)
    return tuple(encoding.ids)


def _too_many(count: str, limit: int) -> ContextLengthError:
    # Agents know these words, and shorten the chat (docs/clients.md).
    return ContextLengthError(
        f"The prompt is too long: {count} tokens > {limit - 1} maximum. This model's maximum "
        f"context length is {limit} tokens."
    )


def most_bytes_per_token(backend: Any, added: Iterable[Any]) -> int | None:
    """Most bytes of text that one token stands for; None if that has no bound."""
    added = list(added)
    if any(token.lstrip or token.rstrip for token in added):
        return None  # These swallow whatever white space is beside them.
    # A byte is one character of a piece, except in added tokens, which are text.
    pieces = (len(piece) for piece in backend.get_vocab(with_added_tokens=False))
    most = max((*pieces, *(len(token.content.encode()) for token in added)))
    if backend.normalizer is None:
        return most
    kind = json.loads(backend.normalizer.__getstate__())["type"]
    return most * NFC_SHRINKS if kind == "NFC" else None
