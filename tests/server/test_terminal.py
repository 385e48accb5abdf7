"""`mlx-mtp generate`: one answer, streamed to the terminal."""

import argparse
import itertools
import re

import pytest

from mlx_mtp.engine import engine as engine_module
from mlx_mtp.errors import EngineStoppedError
from mlx_mtp.options import GENERATE_FLAGS
from mlx_mtp.terminal import stream_answer
from tests.server.fake_engine import FakeEngine, answer


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


def test_generate_ends_when_the_engine_dies_silently(tokenizer, monkeypatch):
    monkeypatch.setattr(engine_module, "PATIENCE", 0.01)
    engine = FakeEngine(lambda _: itertools.repeat(None))
    engine.unhealthy_reason = "the engine's thread died: it was ill"
    with pytest.raises(EngineStoppedError, match="it was ill"):
        stream_answer(engine, tokenizer, {}, options())
