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
from mlx_mtp.errors import MissingHeadError
from mlx_mtp.models.loader import load_model
from mlx_mtp.server.tokenizer import Tokenizer
from tests.conftest import DEMO
from tests.harness import MEASURED, Driver, Ties, greedy, plain, request

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [
    each["prompt"]
    for each in json.loads((ROOT / "tests/data/demo_prompts.json").read_text())["prompts"]
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


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Converted once per precision: the directory, and what was in it before the script ran."""
    made: dict[str, tuple[Path, dict[str, str]]] = {}

    def make(precision: str) -> tuple[Path, dict[str, str]]:
        if precision not in made:
            path = tmp_path_factory.mktemp("models") / precision.replace(" ", "-")
            mlx_lm_convert(str(DEMO), str(path), **PRECISIONS[precision])
            made[precision] = path, digests(path)
            command = [sys.executable, str(ROOT / "scripts" / "add_mtp_weights.py")]
            command += ["--mlx-model-path", str(path), "--source-model", str(DEMO)]
            subprocess.run(command, check=True, capture_output=True)
        return made[precision]

    return make


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


ALL = [
    pytest.param(precision, marks=() if precision == "4 bits" else pytest.mark.full)
    for precision in PRECISIONS
]


@pytest.mark.parametrize("precision", ALL)
def test_served_with_mtp_as_without(models, tokenizer, precision):
    """In one batch at k = 3, against mlx-lm's modules on the same weights."""
    path, _ = models(precision)
    model = load_model(path, enable_mtp=True)
    count = 5 if precision == "4 bits" else 39
    wanted = [
        request(str(i), tokenizer.encode(text), greedy(24))
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
    stats = driver.core.stats()
    accepted = stats.num_accepted_tokens / stats.num_drafts
    MEASURED.append(f"bundled model as {path.name}: {accepted:.2f} drafts accepted per step")
    assert accepted > 0.5


@pytest.mark.parametrize("precision", ["4 bits", pytest.param("mxfp4", marks=pytest.mark.full)])
def test_stock_mlx_lm_sees_no_difference(models, precision):
    path, before = models(precision)
    after = digests(path)
    assert after.pop("mtp.safetensors")
    assert after == before
    with_head = stock_answer(path)
    (path / "mtp.safetensors").rename(path / "away")
    assert with_head == stock_answer(path)
    assert "New Delhi" in with_head
    with pytest.raises(MissingHeadError):
        load_model(path, enable_mtp=True)
    (path / "away").rename(path / "mtp.safetensors")


def stock_answer(path: Path) -> str:
    model, tokenizer = load(str(path))
    message = {"role": "user", "content": "What is the capital of India?"}
    prompt = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, enable_thinking=False
    )
    return generate(model, tokenizer, prompt, max_tokens=12)
