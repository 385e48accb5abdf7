"""Which tokens can be drafted: by the order of the tokenizer's merges, or from a file."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_mtp import build
from mlx_mtp.cli import main as cli
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import count_or_path
from mlx_mtp.text.draft_vocab import draft_vocabulary, read_draft_vocab
from mlx_mtp.text.tokenizer import Tokenizer

VOCAB = 4096
ADDED = range(4087, 4096)  # <|im_end|>, <think>, <tool_call> and the others


def defined(model: dict[str, Any], *added: int) -> Any:
    """Returns a stand-in for a tokenizer, which has only this definition."""
    definition = {"model": model, "added_tokens": [{"id": token} for token in added]}
    return SimpleNamespace(to_json=lambda: json.dumps(definition))


# Ids out of order, and a piece that no merge produces.
PIECES = {"b": 0, "a": 1, "abab": 2, "zzz": 3, "ab": 4, "ba": 5}
MERGES = [["a", "b"], ["b", "a"], ["ab", "ab"]]
SMALL = defined({"type": "BPE", "vocab": PIECES, "merges": MERGES}, 7)
UNIGRAM = defined({"type": "Unigram", "vocab": [["a", -1.0]]})


def test_the_order_is_characters_then_merges_then_the_rest() -> None:
    order = [7, 0, 1, 4, 5, 2, 3]
    for count in range(2, 8):
        assert draft_vocabulary(count, SMALL, 8) == tuple(sorted(order[:count]))
    # Ids beyond the model's smaller vocabulary are never sampled, and so not drafted.
    assert draft_vocabulary(3, SMALL, 5) == (0, 1, 4)


@pytest.mark.parametrize("count", [10, 265, 1024, VOCAB - 1])
def test_the_bundled_tokenizer(tokenizer: Tokenizer, count: int) -> None:
    ids = draft_vocabulary(count, tokenizer, VOCAB)
    assert len(ids) == count
    assert list(ids) == sorted(set(ids) | set(ADDED))
    if count == len(ADDED) + 256:
        assert {len(tokenizer.token_bytes(i)) for i in ids if i not in ADDED} == {1}
    for everything in (None, VOCAB, 1 << 31):
        assert draft_vocabulary(everything, tokenizer, VOCAB) == tuple(range(VOCAB))


def test_what_is_refused(tokenizer: Tokenizer) -> None:
    for wanted, message in (
        (9, r"is 9, but the tokenizer's 9 added .* must be 10 or"),
        ((3, VOCAB), "file names token 4096, but this model's token ids are 0 to 4095"),
        ((3, 4, 3), "file names token 3 twice"),
    ):
        with pytest.raises(UsageError, match=message):
            draft_vocabulary(wanted, tokenizer, VOCAB)
    with pytest.raises(UsageError, match=r"is Unigram and not BPE.*Give a file"):
        draft_vocabulary(2, UNIGRAM, 8)
    assert draft_vocabulary((5, 1), UNIGRAM, 8) == (1, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ids.txt is empty; it must have one token id per line"),
        (b"3\nfour\n", "line 2 is 'four'; every line must be one token id"),
        ("\u0663\n".encode(), "line 1"),
        (b"9" * 5000, "line 1 is '9"),
        (b"\xff\xfe3", "can't be read: it is not UTF-8 text"),
        (None, "must be a number of tokens or a file of token ids, and "),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "ids.txt").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_draft_vocab(tmp_path / "ids.txt")
    assert message in str(caught.value)


def test_the_flag(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tokenizer: Tokenizer,
) -> None:
    file = tmp_path / "ids.txt"
    file.write_text("17\n 300 \r\n5\n")
    # The added tokens are included even if the file lacks them.
    wanted = read_draft_vocab(count_or_path(str(file)))
    assert draft_vocabulary(wanted, tokenizer, VOCAB) == (5, 17, 300, *ADDED)
    assert count_or_path("32768") == 32768
    for text in ("ids.txt", "12k", "1.5"):
        assert count_or_path(text) == Path(text)
    for text in ("0", "-4", "99999999999", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            count_or_path(text)
    assert cli.main(["serve", "--no-enable-mtp", "--mtp-draft-vocab", "1000"], {}) == 2
    assert "MTP is off: leave out --no-enable-mtp" in capsys.readouterr().err
    # A missing file ends every command before the model is loaded.
    monkeypatch.setattr(build, "load", lambda *_, **__: pytest.fail("it was loaded"))
    serve = ["serve", "--port", "0"]
    for command in (serve, ["generate", "x"], ["bench", "offline"]):
        assert cli.main([*command, "--mtp-draft-vocab", "none.txt"], {}) == 2
        assert "none.txt can't be read" in capsys.readouterr().err
