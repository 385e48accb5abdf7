"""Which tokens may be drafted: by the order of the tokenizer's merges, or from a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from mlx_mtp import cli, factories
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import count_or_path
from mlx_mtp.server.draft_vocab import added_ids, draft_vocabulary, ids_by_frequency, read_wanted
from mlx_mtp.server.tokenizer import Tokenizer
from tests.conftest import DEMO

VOCAB = 4096


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


SMALL = {
    "model": {
        "type": "BPE",
        # Ids out of order, and a piece that no merge makes.
        "vocab": {"b": 0, "a": 1, "abab": 2, "zzz": 3, "ab": 4, "ba": 5},
        "merges": [["a", "b"], ["b", "a"], ["ab", "ab"]],
    },
    "added_tokens": [{"id": 7, "content": "<end>", "special": True}],
}


class SmallTokenizer(Tokenizer):
    def __init__(self, definition) -> None:
        self.of_file = definition

    def definition(self):
        return self.of_file


def test_the_order_is_characters_then_merges_then_the_rest():
    assert ids_by_frequency(SMALL) == [0, 1, 4, 5, 2, 3]
    small = SmallTokenizer(SMALL)
    assert draft_vocabulary(4, small, 8) == (0, 1, 4, 7)
    assert draft_vocabulary(5, small, 8) == (0, 1, 4, 5, 7)
    assert draft_vocabulary(2, small, 8) == (0, 7)
    # Ids that are never drawn, because the model's vocabulary is smaller, are no drafts.
    assert draft_vocabulary(3, small, 5) == (0, 1, 4)


@pytest.mark.parametrize("count", [10, 256, 300, 1024, 4000, VOCAB - 1])
def test_the_bundled_tokenizer(tokenizer, count):
    ids = draft_vocabulary(count, tokenizer, VOCAB)
    assert ids == draft_vocabulary(count, Tokenizer.load(DEMO), VOCAB)
    assert len(ids) == len(set(ids)) == count
    assert list(ids) == sorted(ids)
    assert set(range(4087, 4096)) <= set(ids)  # <|im_end|>, <think>, <tool_call> and the others
    written = json.loads((DEMO / "tokenizer.json").read_text())
    first = ["".join(pair) for pair in written["model"]["merges"][: max(count - 9 - 256, 0)]]
    assert {written["model"]["vocab"][piece] for piece in first} <= set(ids)
    smaller = draft_vocabulary(count - 1, tokenizer, VOCAB) if count > 10 else ()
    assert set(smaller) < set(ids)


def test_all_bytes_come_first(tokenizer):
    ids = draft_vocabulary(9 + 256, tokenizer, VOCAB)
    assert {len(tokenizer.token_bytes(i)) for i in ids if i < 4087} == {1}
    assert len({tokenizer.token_bytes(i) for i in ids}) == 9 + 256
    assert added_ids(tokenizer.definition()) == list(range(4087, 4096))


@pytest.mark.parametrize("count", [None, VOCAB, VOCAB + 1, 1 << 31])
def test_as_many_as_there_are_is_all_of_them(tokenizer, count):
    assert draft_vocabulary(count, tokenizer, VOCAB) == tuple(range(VOCAB))


def test_too_few_for_the_added_tokens(tokenizer):
    with pytest.raises(UsageError, match=r"is 9, but the tokenizer's 9 added .* must be 10 or"):
        draft_vocabulary(9, tokenizer, VOCAB)


def test_a_tokenizer_without_merges_asks_for_a_file():
    unigram = {"model": {"type": "Unigram", "vocab": [["a", -1.0]]}, "added_tokens": []}
    with pytest.raises(UsageError, match=r"is Unigram and not BPE.*Give a file"):
        draft_vocabulary(2, SmallTokenizer(unigram), 8)
    assert draft_vocabulary((5, 1), SmallTokenizer(unigram), 8) == (1, 5)


def test_a_file(tokenizer, tmp_path):
    file = tmp_path / "ids.txt"
    file.write_text("17\n 300 \r\n5\n")
    wanted = read_wanted(count_or_path(str(file)))
    assert wanted == (17, 300, 5)
    # The added tokens are in even if the file lacks them, and may be in it.
    assert draft_vocabulary(wanted, tokenizer, VOCAB) == (5, 17, 300, *range(4087, 4096))
    both = draft_vocabulary((17, 4090), tokenizer, VOCAB)
    assert both == (17, *range(4087, 4096))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ids.txt is empty; it must have one token id per line"),
        (b"3\nfour\n", "line 2 is 'four'; every line must be one token id"),
        (b"3\n\n4\n", "line 2 is ''"),
        (b"-3\n", "line 1 is '-3'"),
        (b"3 17\n", "line 1 is '3 17'"),
        (b"[3, 4]\n", "line 1"),
        ("\u0663\n".encode(), "line 1"),
        (b"9" * 5000, "line 1 is '9"),
        (b"\xff\xfe3", "can't be read: it is not UTF-8 text"),
    ],
)
def test_files_that_are_wrong(tmp_path, content, message):
    (tmp_path / "ids.txt").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_wanted(tmp_path / "ids.txt")
    assert message in str(caught.value)


def test_files_that_are_not_there(tmp_path):
    missing = r"must be a number of tokens or a file of token ids, and .*can't be read: "
    with pytest.raises(UsageError, match=missing + "No such file"):
        read_wanted(tmp_path / "none.txt")
    with pytest.raises(UsageError, match=missing + "Is a directory"):
        read_wanted(tmp_path)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((3, VOCAB), "file names token 4096, but this model's token ids are 0 to 4095"),
        ((3, 4, 3), "file names token 3 twice"),
    ],
)
def test_ids_of_a_file_that_are_wrong(tokenizer, ids, message):
    with pytest.raises(UsageError, match=message):
        draft_vocabulary(ids, tokenizer, VOCAB)


@pytest.mark.parametrize(
    ("text", "value"),
    [("32768", 32768), ("ids.txt", Path("ids.txt")), ("12k", Path("12k")), ("1.5", Path("1.5"))],
)
def test_the_flag(text, value):
    assert count_or_path(text) == value


@pytest.mark.parametrize("text", ["0", "-4", "99999999999", ""])
def test_values_that_are_neither(text):
    with pytest.raises(argparse.ArgumentTypeError):
        count_or_path(text)


@pytest.mark.parametrize(
    "command", [["serve", "--port", "0"], ["generate", "x", "--no-enable-mtp"]]
)
def test_without_mtp_it_is_refused(command, capsys):
    assert cli.main([*command, "--mtp-draft-vocab", "1000"], {}) == 2
    assert "MTP is off: add --enable-mtp" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["serve", "--port", "0", "--enable-mtp"], ["generate", "x"], ["bench", "offline"]],
)
def test_a_missing_file_ends_every_command_before_the_load(command, capsys, monkeypatch):
    monkeypatch.setattr(factories, "load", lambda *_, **__: pytest.fail("it was loaded"))
    assert cli.main([*command, "--mtp-draft-vocab", "none.txt"], {}) == 2
    assert "none.txt can't be read" in capsys.readouterr().err


def test_generate_with_it_says_the_same(capsys):
    answers = []
    for more in ([], ["--mtp-draft-vocab", "600"]):
        words = ["generate", "Tell me a story.", "--temperature", "0", "--max-tokens", "24"]
        assert cli.main([*words, "--mtp-num-draft-tokens", "2", *more], {}) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert answers[0].strip()
