"""The bundled model in every precision of mlx-lm's, with its head given back by the script."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_lm import generate, load
from mlx_lm.convert import convert as mlx_lm_convert

from mlx_mtp.config import EngineConfig
from mlx_mtp.convert.verify import Acceptance, measure
from mlx_mtp.errors import MissingHeadError
from mlx_mtp.models.loader import load_model
from mlx_mtp.server.tokenizer import Tokenizer
from tests.conftest import DEMO
from tests.harness import MEASURED, Driver, Ties, greedy, plain, request

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "add_mtp_weights.py"
PROMPTS = [
    each["prompt"]
    for each in json.loads((DEMO.parents[1] / "tests/data/demo_prompts.json").read_text())[
        "prompts"
    ]
]
VOCAB = 4096
EOS = (4089, 4087)
PRECISIONS = {
    "bf16": {},
    "8 bits": {"quantize": True, "q_bits": 8},
    "6 bits": {"quantize": True, "q_bits": 6},
    "4 bits": {"quantize": True, "q_bits": 4},
    "mxfp4": {"quantize": True, "q_mode": "mxfp4"},
    "nvfp4": {"quantize": True, "q_mode": "nvfp4"},
    "mxfp8": {"quantize": True, "q_mode": "mxfp8"},
}


def digests(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def run_script(model: Path, *arguments: str) -> str:
    command = [sys.executable, str(SCRIPT), "--mlx-model-path", str(model)]
    done = subprocess.run(
        [*command, "--source-model", str(DEMO), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Converted once per precision, the head added by the script."""
    made: dict[str, Path] = {}

    def make(precision: str) -> Path:
        if precision not in made:
            path = tmp_path_factory.mktemp("models") / precision.replace(" ", "-")
            mlx_lm_convert(str(DEMO), str(path), **PRECISIONS[precision])
            run_script(path)
            made[precision] = path
        return made[precision]

    return make


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


def acceptance(path: Path, tokenizer: Tokenizer, count: int, num_tokens: int) -> Acceptance:
    """Over the shortest prompts, as the CPU's prefill goes token by token."""
    prompts = sorted((tokenizer.encode(text) for text in PROMPTS), key=len)[:count]
    return measure(load_model(path, enable_mtp=True), prompts, num_tokens)


def check_equal_with_and_without_mtp(path: Path, tokenizer: Tokenizer, count: int) -> None:
    """Served in one batch at k = 3, against mlx-lm's modules on the same weights."""
    model = load_model(path, enable_mtp=True)
    wanted = [
        request(str(i), tokenizer.encode(text), greedy(32))
        for i, text in enumerate(PROMPTS[:count])
    ]
    config = EngineConfig(num_draft_tokens=3, max_num_seqs=16)
    driver = Driver(model, vocab_size=VOCAB, stop_ids=EOS, config=config)
    for each in wanted:
        driver.add(each)
    got = driver.run()
    ties = Ties()
    for each in wanted:
        ties.check(each.request_id, got[each.request_id], plain(model, each, VOCAB, EOS))
    ties.report(f"bundled model as {path.name}, k = 3")
    assert driver.core.stats().num_accepted_tokens > 0


def test_four_bits_are_served_with_mtp(models, tokenizer):
    check_equal_with_and_without_mtp(models("4 bits"), tokenizer, 8)


def test_eight_bits_accept_as_the_bf16_head_does(models, tokenizer):
    eight = acceptance(models("8 bits"), tokenizer, 15, 16)
    original = acceptance(DEMO, tokenizer, 15, 16)
    assert eight.num_windows > 60
    assert eight.rates[0] >= original.rates[0] - 0.03


@pytest.mark.full
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_is_served_with_mtp(models, tokenizer, precision):
    check_equal_with_and_without_mtp(models(precision), tokenizer, 39)


@pytest.mark.full
def test_acceptance_of_every_precision(models, tokenizer):
    """8 bits within 3 points; the others are reported."""
    original = acceptance(DEMO, tokenizer, 60, 24)
    reference = original.rates
    MEASURED.append(f"acceptance over {original.num_windows} windows: {shown(reference)}")
    for precision in PRECISIONS:
        rates = acceptance(models(precision), tokenizer, 60, 24).rates
        MEASURED.append(f"  as {precision}: {shown(rates)}")
        if precision in ("bf16", "8 bits"):
            assert rates[0] >= reference[0] - 0.03
        assert rates[0] > 0.5


def shown(rates: tuple[float, ...]) -> str:
    return ", ".join(f"{rate:.3f}" for rate in rates)


@pytest.mark.parametrize("precision", ["4 bits", pytest.param("mxfp4", marks=pytest.mark.full)])
def test_stock_mlx_lm_sees_no_difference(tmp_path, precision):
    path = tmp_path / "model"
    mlx_lm_convert(str(DEMO), str(path), **PRECISIONS[precision])
    before, text = digests(path), stock_answer(path)
    run_script(path)
    after = digests(path)
    assert after.pop("mtp.safetensors")
    assert after == before
    assert stock_answer(path) == text
    assert "New Delhi" in text
    (path / "mtp.safetensors").unlink()
    with pytest.raises(MissingHeadError):
        load_model(path, enable_mtp=True)


def stock_answer(path: Path) -> str:
    model, tokenizer = load(str(path))
    message = {"role": "user", "content": "What is the capital of India?"}
    prompt = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, enable_thinking=False
    )
    return generate(model, tokenizer, prompt, max_tokens=12)
