"""`mlx-mtp generate`: one answer, streamed to the terminal."""

import argparse
import itertools
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp import build
from mlx_mtp.cli.generate import stream_answer
from mlx_mtp.console import clean
from mlx_mtp.errors import EngineStoppedError
from mlx_mtp.options import GENERATE_FLAGS
from tests.support.fake_engine import FakeEngine, answer
from tests.support.foreign_values import STEERING

BIDI = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def options(**more: object) -> argparse.Namespace:
    return argparse.Namespace(
        **({flag.key: flag.default for flag in GENERATE_FLAGS} | {"prompt": "hi"} | more)
    )


def test_generate_prints_the_answer_and_then_its_speed(tokenizer, capsys):
    engine = FakeEngine(answer(tokenizer.encode("Hello, 🎉! And more.")))
    asked = options(system="Be kind.", stop=" And", temperature=0.5, seed=3, max_tokens=99)
    assert stream_answer(engine, tokenizer, {"top_k": 20}, asked) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello, 🎉!\n"
    assert re.search(r"\d+ tokens, [\d.]+/s", captured.err)
    assert re.search(r"\d+% of \d+ drafts accepted\]", captured.err)
    (request,) = engine.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 20, 3)
    assert "Be kind." in tokenizer.text_of(request.prompt_token_ids)


def test_generate_steers_no_terminal_and_leaves_pipes_alone(tokenizer, capsys, monkeypatch):
    said = "a\x1b]52;c;eA==\x07\tb\r\n\x9b2J\u202e\u3000👩‍🚀"
    for is_terminal, shown in ((False, said), (True, clean(said))):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        engine = FakeEngine(answer(tokenizer.encode(said)))
        assert stream_answer(engine, tokenizer, {}, options(max_tokens=99)) == 0
        assert capsys.readouterr().out == f"{shown}\n"


@given(st.lists(st.text(st.characters() | st.sampled_from(STEERING))))
def test_clean_text_is_readable_and_steers_nothing(pieces):
    text = "".join(pieces)
    found = "".join(map(clean, pieces))
    assert found == clean(text) == clean(found)
    found.encode()
    for character in found:
        kind = unicodedata.category(character)
        assert kind not in ("Cc", "Cs", "Zl", "Zp") or character in "\n\t"
        assert unicodedata.bidirectional(character) not in BIDI
    assert clean("a\tb\n\u3000\xa0👩‍🚀 שלום") == "a\tb\n\u3000\xa0👩‍🚀 שלום"


def test_generate_ends_when_the_engine_dies_silently(tokenizer, monkeypatch):
    monkeypatch.setattr(build, "PATIENCE", 0.01)
    engine = FakeEngine(lambda _: itertools.repeat(None))
    engine.unhealthy_reason = "the engine died: it was ill"
    with pytest.raises(EngineStoppedError, match="it was ill"):
        stream_answer(engine, tokenizer, {}, options())
