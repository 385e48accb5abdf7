"""`--verify` measures what serving would accept, and tells a wrong head from a right one."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.config import EngineConfig
from mlx_mtp.convert.add_head import Request, add_head
from mlx_mtp.convert.console import Console
from mlx_mtp.convert.verify import DEPTH, measure, trace, verify
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.loader import load_model
from mlx_mtp.server.tokenizer import Tokenizer
from tests.conftest import DEMO
from tests.convert.checkpoints import Raw, bf16, decode, read_file, write_file
from tests.harness import Driver, greedy, request

STORY = "<|im_start|>user\nTell me a short story about a fox.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return Tokenizer.load(DEMO).encode(STORY)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_are_those_that_the_engine_makes(demo_model, prompt, depth):
    """Walking through the traced drafts as the engine steps, the same ones are accepted."""
    tokens, drafts = trace(demo_model, prompt, 40)
    steps = accepted = 0
    at = 0
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


def test_counts_are_of_prefixes(demo_model, prompt):
    tokens, drafts = trace(demo_model, prompt, 40)
    acceptance = measure(demo_model, [prompt, prompt], 40)
    assert acceptance.num_windows == 2 * (len(tokens) - DEPTH)
    for depth in range(1, DEPTH + 1):
        right = sum(
            drafts[i][:depth] == tokens[i + 1 : i + 1 + depth] for i in range(len(tokens) - DEPTH)
        )
        assert acceptance.num_accepted[depth - 1] == 2 * right
    assert acceptance.rates[0] > 0.5


def test_a_trunk_of_one_token_accepts_all_and_a_spoilt_head_nothing(prompt):
    model = load_model(DEMO, enable_mtp=True)
    model.causal_lm.lm_head.weight = mx.zeros_like(model.causal_lm.lm_head.weight)
    constant = measure(model, [prompt], 16)  # all logits are equal: token 0, always
    assert constant.rates == (1.0, 1.0, 1.0)
    spoilt = load_model(DEMO, enable_mtp=True)
    head = spoilt.head
    head.load_weights([("fc.weight", mx.zeros_like(head.fc.weight))], strict=False)
    assert measure(spoilt, [prompt], 32).rates[2] == 0.0


def test_a_healthy_head_is_told_beside_healthy_figures(capsys):
    acceptance = verify(DEMO, Console())
    said = capsys.readouterr().out
    assert acceptance.rates[0] > 0.7
    assert f"depth 1:  {acceptance.rates[0]:.1%}" in said
    assert said.count("healthy heads") == 3


def test_a_head_whose_norms_lack_their_one_fails_before_it_is_put_in_place(tmp_path, capsys):
    """What a wrong --mtp-norms gives: acceptance tells, and the model stays as it was."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for path in DEMO.glob("*.json"):
        (source / path.name).write_bytes(path.read_bytes())
        (target / path.name).write_bytes(path.read_bytes())
    (source / "model.safetensors.index.json").unlink()
    trunk: dict[str, Raw] = {}
    head: dict[str, Raw] = {}
    for path in DEMO.glob("*.safetensors"):
        for name, raw in read_file(path)[0].items():
            (head if name.startswith("mtp.") else trunk)[name] = raw
    (target / "model.safetensors.index.json").unlink()
    write_file(target / "model.safetensors", trunk, {"format": "pt"})
    write_file(source / "mtp.safetensors", head, {})
    before = {p.name: p.read_bytes() for p in target.iterdir()}
    wrong = Request(str(target), str(source), mtp_norms="mlx", verify=True)
    with pytest.raises(ConvertError, match="The head is wrong"):
        add_head(wrong, Console())
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before
    add_head(Request(str(target), str(source), mtp_norms="hf", verify=True), Console())
    assert "healthy" in capsys.readouterr().out
    model = load_model(target, enable_mtp=True)
    norm = dict(tree_flatten(model.head.parameters()))["norm.weight"]
    expected = mx.array(decode(head["mtp.norm.weight"])) + 1
    assert mx.array_equal(norm, expected)
    assert bf16(decode(head["mtp.norm.weight"])).tolist() == head["mtp.norm.weight"].bits.tolist()


def test_verify_runs_also_when_there_is_nothing_to_do(tmp_path, capsys):
    target = _linked_trunk(tmp_path)
    add_head(Request(str(target), str(DEMO), force=True), Console())
    capsys.readouterr()
    add_head(Request(str(target), str(DEMO), verify=True), Console())
    said = capsys.readouterr().out
    assert "nothing to do" in said
    assert "depth 3" in said


def _linked_trunk(tmp_path: Path) -> Path:
    target = tmp_path / "linked"
    target.mkdir()
    for path in DEMO.iterdir():
        if path.suffix in (".json", ".safetensors"):
            (target / path.name).symlink_to(path)
    return target
