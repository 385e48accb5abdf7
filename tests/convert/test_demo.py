"""The bundled model in every precision of mlx-lm, with its head added again; and `--verify`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import generate, load
from mlx_lm.convert import convert as mlx_lm_convert

from mlx_mtp.config import EngineConfig
from mlx_mtp.convert import verify
from mlx_mtp.convert.convert import add_head
from mlx_mtp.errors import ConvertError, MissingHeadError
from mlx_mtp.models.loader import load_model
from mlx_mtp.text.tokenizer import Tokenizer
from tests.conftest import DEMO
from tests.convert.conftest import snapshot
from tests.support.checkpoints import read_file, write_file
from tests.support.harness import MEASURED, Driver, Ties, greedy, plain, request

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = json.loads((ROOT / "tests/data/demo_prompts.json").read_text())["prompts"]
VOCAB, EOS = 4096, (4089, 4087)
PRECISIONS = {
    "4-bits": {"quantize": True, "q_bits": 4},
    "bf16": {},
    **{f"{bits}-bits": {"quantize": True, "q_bits": bits} for bits in (8, 6)},
    **{mode: {"quantize": True, "q_mode": mode} for mode in ("mxfp4", "nvfp4", "mxfp8")},
}
ALL = [*PRECISIONS][:1] + [pytest.param(each, marks=pytest.mark.full) for each in [*PRECISIONS][1:]]


def answer(path: Path) -> str:
    """Returns stock mlx-lm's answer to a question."""
    model, tokenizer = load(str(path))
    model.set_dtype(mx.float32)  # on a CPU mlx has no experts in bfloat16
    message = {"role": "user", "content": "What is the capital of India?"}
    options = {"add_generation_prompt": True, "enable_thinking": False}
    prompt = tokenizer.apply_chat_template([message], **options)
    return generate(model, tokenizer, prompt, max_tokens=12)


@pytest.mark.parametrize("precision", ALL)
def test_served_with_mtp_as_without_and_stock_mlx_lm_sees_no_difference(tmp_path, precision):
    """Answers in one batch at k = 3 equal those of mlx-lm's modules on the same weights."""
    path, tokenizer = tmp_path / precision, Tokenizer.load(DEMO)
    mlx_lm_convert(str(DEMO), str(path), **PRECISIONS[precision])
    before, said = snapshot(path), answer(path)
    with pytest.raises(MissingHeadError):
        load_model(path, enable_mtp=True)
    # The script works without the package on the path, and in any directory.
    command = [sys.executable, "-P", str(ROOT / "scripts" / "add_mtp_weights.py")]
    command += ["--mlx-model-path", precision, "--source-model", str(DEMO)]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    after = snapshot(path)
    assert after.pop("mtp.safetensors")
    assert after == before
    assert answer(path) == said
    assert "New Delhi" in said

    model = load_model(path, enable_mtp=True)
    prompts = [tokenizer.encode(each["prompt"]) for each in PROMPTS]
    count = 5 if precision == "4-bits" else 39
    wanted = [request(str(i), prompt, greedy(24)) for i, prompt in enumerate(prompts[:count])]
    config = EngineConfig(num_draft_tokens=3, max_num_seqs=16)
    driver = Driver(model, vocab_size=VOCAB, stop_ids=EOS, config=config)
    for each in wanted:
        driver.add(each)
    got = driver.run()
    ties = Ties()
    for each in wanted:
        ties.check(each.request_id, got[each.request_id], plain(model, each, VOCAB, EOS))
    ties.report(f"bundled model as {precision}, k = 3")
    stats = driver.core.scheduler.stats()
    accepted = stats.num_accepted_tokens / stats.num_draft_windows
    MEASURED.append(f"bundled model as {precision}: {accepted:.2f} drafts accepted per step")
    assert accepted > 0.5


def test_a_wrong_head_is_not_put_in_place_and_a_right_one_is(tmp_path, capsys, monkeypatch):
    """`--verify` rejects a head whose norms lack the 1, as a wrong --mtp-norms makes it."""
    monkeypatch.setattr(verify, "PROMPTS", verify.PROMPTS[1::2])
    monkeypatch.setattr(verify, "NUM_TOKENS", 16)
    source, target = tmp_path / "source", tmp_path / "target"
    tensors = {}
    for path in DEMO.glob("*.safetensors"):
        tensors |= read_file(path)[0]
    for directory, is_head in ((source, True), (target, False)):
        directory.mkdir()
        for path in DEMO.glob("*.json"):
            if "index" not in path.name:
                shutil.copy(path, directory)
        kept = {name: each for name, each in tensors.items() if name.startswith("mtp.") == is_head}
        name, metadata = ("mtp", {}) if is_head else ("model", {"format": "pt"})
        write_file(directory / f"{name}.safetensors", kept, metadata)
    before = snapshot(target)
    with pytest.raises(ConvertError, match="The head is wrong"):
        add_head(str(target), str(source), mtp_norms="mlx", verify=True)
    assert snapshot(target) == before
    add_head(str(target), str(source), mtp_norms="hf", verify=True)
    assert load_model(target, enable_mtp=True).head_source == "sidecar mtp.safetensors"
    capsys.readouterr()
    add_head(str(target), str(source), mtp_norms="hf", verify=True)
    said = capsys.readouterr().out
    assert "nothing to do" in said
    assert said.count("healthy heads") == 3
    first, second, third = map(float, re.findall(r"depth \d: +([\d.]+)%", said))
    assert 100 >= first >= second > third > 40
