"""The tokens of a reduced draft vocabulary: `--mtp-draft-vocab N` or a file of token ids.

The N most frequent tokens follow from the tokenizer's merges: byte-pair encoding merges the most
frequent pair first, so merges are in the order of frequency.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_mtp.errors import UsageError
from mlx_mtp.sampling.params import check_draft_vocab
from mlx_mtp.text.tokenizer import Tokenizer

FLAG = "--mtp-draft-vocab"
DraftVocab = int | tuple[int, ...] | None  # number of tokens, or their ids; None: all


def read_draft_vocab(given: int | Path | None) -> DraftVocab:
    """Returns the flag's value, a path replaced by the ids in the file, one token id per line.

    Raises UsageError if the file can't be read or a line is not a token id.
    """
    if not isinstance(given, Path):
        return given
    try:
        text = given.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        # The value can also be a mistyped number, which was taken for a file.
        raise UsageError(
            f"{FLAG} must be a number of tokens or a file of token ids, and {given} can't be read: "
            f"{error.strerror if isinstance(error, OSError) else 'it is not UTF-8 text'}."
        ) from error
    ids = []
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip()
        if not (word.isascii() and word.isdigit() and len(word) <= 18):
            raise UsageError(
                f"{given}: line {number} is {line[:40]!r}; every line must be one token id."
            )
        ids.append(int(word))
    if not ids:
        raise UsageError(f"{given} is empty; it must have one token id per line.")
    return tuple(ids)


def draft_vocabulary(chosen: DraftVocab, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids of the tokens that may be drafted, ascending.

    These are the tokens that `chosen` names and the tokenizer's added tokens, which count as a part
    of a number of tokens. Raises UsageError if the number is too small or an id is invalid.
    """
    if chosen is None or (isinstance(chosen, int) and chosen >= vocab_size):
        return tuple(range(vocab_size))
    definition = json.loads(tokenizer.to_json())
    added = [token["id"] for token in definition["added_tokens"] if token["id"] < vocab_size]
    if not isinstance(chosen, int):
        return tuple(sorted({*check_draft_vocab(chosen, vocab_size, f"{FLAG}'s file"), *added}))
    if chosen <= len(added):
        raise UsageError(
            f"{FLAG} is {chosen}, but the tokenizer's {len(added)} added tokens, such as those "
            f"that end an answer, are always included: it must be {len(added) + 1} or more."
        )
    ranked = [token for token in _ids_by_frequency(definition["model"]) if token < vocab_size]
    return tuple(sorted(list(dict.fromkeys([*added, *ranked]))[:chosen]))


def _ids_by_frequency(model: Mapping[str, Any]) -> list[int]:
    """Returns all ids of a BPE vocabulary: single characters (bytes) first, then merged tokens."""
    if model.get("type") != "BPE":
        raise UsageError(
            f"{FLAG} can't choose tokens by itself: this tokenizer is {model.get('type')} and not "
            "BPE, so it is not known which tokens are frequent. Give a file of token ids."
        )
    vocab: dict[str, int] = model["vocab"]
    by_id = sorted(vocab.items(), key=lambda item: item[1])
    characters = [token for piece, token in by_id if len(piece) == 1]
    merged = [vocab["".join(pair)] for pair in model["merges"] if "".join(pair) in vocab]
    # Tokens that no merge produces come last.
    return list(dict.fromkeys([*characters, *merged, *vocab.values()]))
