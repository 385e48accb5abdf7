"""`--verify` measures what serving would accept, and a wrong head fails it."""

from __future__ import annotations

import shutil

import mlx.core as mx
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.convert import verify
from mlx_mtp.convert.convert import add_head
from mlx_mtp.convert.verify import DEPTH, measure, trace, verify_head
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.loader import load_model
from mlx_mtp.server.tokenizer import Tokenizer
from tests.conftest import DEMO
from tests.convert.checkpoints import Raw, read_file, write_file
from tests.harness import Driver, greedy, request

STORY = "<|im_start|>user\nTell me a short story about a fox.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return Tokenizer.load(DEMO).encode(STORY)


@pytest.fixture(scope="module")
def traced(demo_model, prompt):
    return trace(demo_model, prompt, 40)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(verify, "PROMPTS", verify.PROMPTS[1::2])
    monkeypatch.setattr(verify, "NUM_TOKENS", 16)


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_drafts_are_those_that_the_engine_makes(demo_model, prompt, traced, depth):
    """Walking through the traced drafts as the engine steps, the same ones are accepted."""
    tokens, drafts = traced
    steps = accepted = at = 0
    while at + depth + 1 < len(tokens):
        ahead = zip(drafts[at][:depth], tokens[at + 1 :])
        right = next((i for i, (a, b) in enumerate(ahead) if a != b), depth)
        steps, accepted, at = steps + 1, accepted + right, at + right + 1
    config = EngineConfig(num_draft_tokens=depth, overlap=False)
    driver = Driver(demo_model, vocab_size=4096, config=config)
    driver.add(request("a", prompt, greedy(at + 1, ignore_eos=True)))
    assert driver.run()["a"] == tokens[: at + 1]
    stats = driver.core.stats()
    assert (stats.num_drafts, stats.num_accepted_tokens) == (steps, accepted)


def test_rates_are_of_prefixes(demo_model, prompt, traced, monkeypatch):
    tokens, drafts = traced
    monkeypatch.setattr(verify, "trace", lambda *_: traced)
    acceptance = measure(demo_model, [prompt, prompt], 40)
    count = len(tokens) - DEPTH
    assert acceptance.num_windows == 2 * count
    for depth, rate in enumerate(acceptance.rates, 1):
        right = sum(drafts[i][:depth] == tokens[i + 1 : i + 1 + depth] for i in range(count))
        assert rate == pytest.approx(right / count)
    assert acceptance.rates[0] > 0.5
    assert measure(demo_model, [], 40) == (0, (0.0, 0.0, 0.0))


def test_a_trunk_of_one_token_accepts_all_and_a_spoilt_head_nothing(prompt):
    model = load_model(DEMO, enable_mtp=True)
    head, lm_head = model.head, model.causal_lm.lm_head
    fc = head.fc.weight
    head.load_weights([("fc.weight", mx.zeros_like(fc))], strict=False)
    assert measure(model, [prompt], 16).rates[2] == 0.0
    head.load_weights([("fc.weight", fc)], strict=False)
    lm_head.weight = mx.zeros_like(lm_head.weight)
    # All logits are equal: token 0, always.
    assert measure(model, [prompt], 8).rates == (1.0, 1.0, 1.0)


def test_a_wrong_head_is_not_put_in_place_and_a_right_one_is(tmp_path, capsys, short):
    """Without the norms' 1, which is what a wrong --mtp-norms gives."""
    source, target = tmp_path / "source", tmp_path / "target"
    raws: dict[str, Raw] = {}
    for path in DEMO.glob("*.safetensors"):
        raws |= read_file(path)[0]
    for directory, is_head in ((source, True), (target, False)):
        directory.mkdir()
        for path in DEMO.glob("*.json"):
            if "index" not in path.name:
                shutil.copy(path, directory)
        kept = {name: raw for name, raw in raws.items() if name.startswith("mtp.") == is_head}
        name, metadata = ("mtp", {}) if is_head else ("model", {"format": "pt"})
        write_file(directory / f"{name}.safetensors", kept, metadata)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(ConvertError, match="The head is wrong"):
        add_head(str(target), str(source), mtp_norms="mlx", verify=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    add_head(str(target), str(source), mtp_norms="hf", verify=True)
    assert load_model(target, enable_mtp=True).head_source == "sidecar mtp.safetensors"
    capsys.readouterr()
    add_head(str(target), str(source), mtp_norms="hf", verify=True)
    said = capsys.readouterr().out
    assert "nothing to do" in said
    assert said.count("healthy heads") == 3


@pytest.mark.full
def test_a_healthy_head_is_shown_beside_healthy_figures(capsys):
    acceptance = verify_head(DEMO)
    said = capsys.readouterr().out
    assert acceptance.rates[0] > 0.7
    assert f"depth 1:  {acceptance.rates[0]:.1%}" in said
