"""Packs with a Hadamard rotation (`prism_hadamard_qwen35`) are served with a head of their base."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.prism_hadamard_qwen35 import hadamard_rotate
from mlx_lm.utils import load_model as mlx_lm_load

from mlx_mtp.config import EngineConfig
from mlx_mtp.convert.convert import add_head
from mlx_mtp.errors import UsageError
from mlx_mtp.models.loader import load_model
from tests.support.cases import EOS
from tests.support.checkpoints import read_file, write_source
from tests.support.harness import Driver, greedy, request
from tests.support.tiny_models import VOCAB, Layout, change_json, config_json

LAYOUT = Layout("qwen3_5", hidden_size=512, intermediate_size=512)
PACKED = {"bits": 2, "group_size": 128, "mode": "affine"}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """A pack made from a tiny model, and the source that has its head."""
    root = tmp_path_factory.mktemp("hadamard")
    source, path = root / "source", root / "pack"
    write_source(source, LAYOUT)
    path.mkdir()
    model = load_model(source, enable_mtp=False, dtype="float32").model.language_model
    weights, modules = {}, []
    for name, module in model.named_modules():
        rows = module.weight if isinstance(module, nn.Linear | nn.Embedding) else None
        if rows is None or rows.shape[-1] != 512 or name.endswith(("in_proj_a", "in_proj_b")):
            continue
        embedding = isinstance(module, nn.Embedding)
        modules += [{"path": name, "block": 512, "embedding": embedding, "dtype": "float16"}]
        signs = np.random.default_rng(len(name)).choice([-1.0, 1.0], 512)
        weights[f"{name}.signs"] = mx.array(signs.astype(np.float32))
        parts = mx.quantize(hadamard_rotate(rows, 512, weights[f"{name}.signs"]), **PACKED)
        for part, value in zip(("weight", "scales", "biases"), parts, strict=True):
            weights[f"{name}.{part}"] = value if part == "weight" else value.astype(mx.float16)
    weights = {**dict(tree_flatten(model.parameters())), **weights}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config_json(LAYOUT)))
    own = {"model_type": "prism_hadamard_qwen35", "schema_version": 1, "modules": modules}
    own |= {"tensor_namespace": "mlx-lm-text", "quantization": PACKED}
    change_json(path / "config.json", **own)
    add_head(str(path), str(source))
    return path


@pytest.fixture(scope="module")
def theirs(pack):
    """mlx-lm's model of the pack, in float32."""
    model, _ = mlx_lm_load(pack)
    model.set_dtype(mx.float32)
    return model


def test_the_engines_tokens_are_those_of_mlx_lm_with_and_without_drafts(pack, theirs):
    assert read_file(pack / "mtp.safetensors")[1]["bits"] == "4"
    model = load_model(pack, enable_mtp=True, dtype="float32")
    prompts = {f"r{number}": [5, 9, 2 + number, 33] for number in range(3)}
    answers = []
    for depth in (0, 3):
        config = EngineConfig(num_draft_tokens=depth)
        driver = Driver(model, vocab_size=VOCAB, stop_ids=(EOS,), config=config)
        for name, prompt in prompts.items():
            driver.add(request(name, prompt, greedy(24)))
        answers.append(driver.run())
    assert answers[0] == answers[1]
    for name, prompt in prompts.items():
        tokens = [*prompt, *answers[0][name]]
        logits = np.array(theirs(mx.array([tokens])))[0, len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(logits)), tokens[len(prompt) :]]
        np.testing.assert_allclose(chosen, logits.max(axis=-1), atol=5e-3)


def test_several_ranks_refuse_it(pack):
    with pytest.raises(UsageError, match="Hadamard rotation"):
        load_model(pack, enable_mtp=True, part=(0, 2))
