"""The engine alone: a scripted one for the arithmetic, the real one for the whole command."""

from __future__ import annotations

import re

import pytest

from mlx_mtp import cli
from mlx_mtp.bench.answer import Split
from mlx_mtp.bench.offline import EngineSubject, make_engine
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.bench.runs import Asking
from mlx_mtp.engine import arrivals
from mlx_mtp.errors import EngineStoppedError, StepError
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.server.tokenizer import Tokenizer
from tests.bench.fake_server import ticking
from tests.server.fake_engine import FakeEngine, answer, out

PROMPTS = [Prompt("one", 3), Prompt("two", 4)]


class Words:
    """A tokenizer of one token a word."""

    vocab_size = 4096
    eos_token_ids = ()

    def encode_chat(self, messages):
        return tuple(len(word) for message in messages for word in message["content"].split())


def subject(engine: FakeEngine, **more) -> EngineSubject:
    return EngineSubject(**{"name": "E", "engine": engine, "tokenizer": Words()} | more)


def test_tokens_and_times_are_those_of_the_steps():
    engine = FakeEngine(answer([7] * 9, sizes=(1, 3)))
    with subject(engine, asking=Asking(max_tokens=6), clock=ticking()) as measured:
        (found,) = measured.ask([Prompt("to be or not", 3)])
    # Steps of 1, 3, 1 and 1 tokens, a second apart; the last is cut at the limit.
    assert found.tokens == (1, 3, 1, 1)
    assert found.times == tuple(found.sent + i for i in (1, 2, 3, 4))
    assert (found.num_tokens, found.num_events, found.split) == (6, 4, Split.TOLD)
    assert found.prompt_tokens == 4
    assert (found.num_drafts, found.num_accepted) == (8, 2)
    assert engine.submitted[-1].sampling.seed == 3


def test_requests_are_what_was_asked_for():
    engine = FakeEngine(answer([7]))
    asking = Asking(max_tokens=6, temperature=0.5, ignore_eos=True)
    with subject(engine, asking=asking) as measured:
        assert len(measured.ask(PROMPTS)) == 2
    assert [request.sampling.seed for request in engine.submitted] == [0, 3, 4]
    for request in engine.submitted:
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature) == (6, 0.5)
        assert sampling.ignore_eos
    assert len({request.request_id for request in engine.submitted}) == 3


def test_a_step_that_fails_ends_the_measurement():
    failing = iter([answer([7]), lambda _: iter([out(finish="error", error=StepError("ill"))])])
    engine = FakeEngine(lambda request: next(failing)(request))
    with (
        pytest.raises(StepError, match="ill"),
        subject(engine, asking=Asking()) as measured,
    ):
        measured.ask(PROMPTS[:1])


def test_an_engine_that_dies_silently_is_noticed(monkeypatch):
    monkeypatch.setattr(arrivals, "PATIENCE", 0.01)

    def silent(_):
        engine.unhealthy_reason = "it was ill"
        while True:
            yield None

    engine = FakeEngine(silent)
    with (
        pytest.raises(EngineStoppedError, match="it was ill"),
        subject(engine, asking=Asking()),
    ):
        pass


def test_mtp_off_is_without_the_heads_work(demo_model):
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    engine = make_engine(demo_model, tokenizer, 0, max_num_seqs=2, calibration_seconds=0)
    assert engine.info.num_draft_tokens == 0
    assert not engine.info.mtp_enabled
    assert demo_model.head is not None
    # The same tokens come out of all, which share the weights.
    tokens = []
    for depth in (0, 2, "auto"):
        engine = make_engine(demo_model, tokenizer, depth, max_num_seqs=2, calibration_seconds=0)
        asking = Asking(max_tokens=12, ignore_eos=True)
        with EngineSubject("E", engine, tokenizer, asking) as measured:
            answers = measured.ask([Prompt("Tell me a story.", 1)] * 2)
        tokens.append([a.num_tokens for a in answers])
        assert (sum(a.num_drafts for a in answers) > 0) == (depth == 2) or depth == "auto"
    assert tokens == [[12, 12]] * 3


def test_the_bundled_model_for_real(capsys, tmp_path):
    few = ("--rounds", "1", "--max-tokens", "12", "--concurrency", "1,2", "--prompts", "story")
    more = ("--depths", "2", "--csv", str(tmp_path / "a.csv"))
    assert cli.main(["bench", "offline", *few, *more], {}) == 0
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0] == ["engine", "1 at once", "2 at once", "drafts accepted"]
    assert cells[2][0] == "MTP off"
    assert re.fullmatch(r"\d+ \(1\.00\)", cells[2][1])
    assert cells[2][3] == "-"
    assert cells[3][0] == "MTP, k = 2"
    assert re.fullmatch(r"\d+ \(\d+\.\d\d\)", cells[3][1])
    assert re.fullmatch(r"[\d.]+%", cells[3][3])
    assert "qwen3_next; mlx " in told
    assert (tmp_path / "a.csv").read_text().count("\n") == 1 + 4
