"""The offline benchmark: a scripted engine for the arithmetic, the real one for the command."""

import re

from mlx_mtp import build
from mlx_mtp.bench import offline
from mlx_mtp.bench.answer import Split
from mlx_mtp.bench.measure import Asking
from mlx_mtp.bench.offline import EngineSubject, engine_subject
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.cli import main as cli
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.text.tokenizer import Tokenizer
from tests.bench.test_commands import table_of
from tests.support.fake_engine import FakeEngine, answer


class Words:
    """A tokenizer with one token per word."""

    vocab_size = 4096
    eos_token_ids = ()

    def encode_chat(self, messages):
        return tuple(len(word) for message in messages for word in message["content"].split())


def test_tokens_and_times_are_those_of_the_steps(ticking):
    ticking(build, offline)
    engine = FakeEngine(answer([7] * 9, sizes=(1, 3)))
    asking = Asking(max_tokens=6, temperature=0.5, ignore_eos=True)
    with EngineSubject("E", engine, Words(), asking) as measured:
        (found,) = measured.ask([Prompt("to be or not", 3)])
    # Steps of 1, 3, 1 and 1 tokens, one second apart; the token limit cuts the last step.
    assert found.tokens == (1, 3, 1, 1)
    assert found.times == tuple(found.sent + i for i in (1, 2, 3, 4))
    assert found.ended == found.times[-1]
    assert (found.num_tokens, found.num_events, found.split) == (6, 4, Split.TOLD)
    assert (found.prompt_tokens, found.num_drafts, found.num_accepted) == (4, 8, 2)
    hello, asked = engine.submitted
    assert hello.request_id != asked.request_id
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (6, 0.5, 3)
    assert sampling.ignore_eos


def test_mtp_off_is_without_the_heads_work(demo_model):
    """An engine with MTP off drafts nothing, and leaves the shared model its head."""
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    asking = Asking(max_tokens=8, ignore_eos=True)
    for depth, name in ((0, "MTP off"), (2, "MTP, k = 2"), ("auto", "MTP, auto")):
        measured = engine_subject(
            demo_model, tokenizer, depth, asking, max_num_seqs=2, calibration_seconds=0
        )
        info = measured.engine.info
        assert (measured.name, info.num_draft_tokens, info.mtp_enabled) == (name, depth, depth != 0)
        with measured:
            answers = measured.ask([Prompt("Tell me a story.", 1)] * 2)
        assert [a.num_tokens for a in answers] == [8, 8]
        assert (sum(a.num_drafts for a in answers) > 0) == (depth == 2) or depth == "auto"
    assert demo_model.head is not None


def test_the_bundled_model_for_real(capsys, tmp_path):
    few = ("--rounds", "1", "--max-tokens", "12", "--concurrency", "1,2", "--prompts", "story")
    more = ("--depths", "2", "--csv", str(tmp_path / "a.csv"))
    assert cli.main(["bench", "offline", *few, *more], {}) == 0
    shown = capsys.readouterr().out
    header, off, on = table_of(shown)
    assert header == ["engine", "1 at once", "2 at once", "drafts accepted"]
    assert (off[0], off[3], on[0]) == ("MTP off", "-", "MTP, k = 2")
    assert re.fullmatch(r"\d+ \(1\.00\)", off[1])
    assert re.fullmatch(r"\d+ \(\d+\.\d\d\)", on[1])
    assert re.fullmatch(r"[\d.]+%", on[3])
    assert "in brackets the ratio to MTP off.\n" in shown
    assert "qwen3_next; mlx " in shown
    assert (tmp_path / "a.csv").read_text().count("\n") == 1 + 4
