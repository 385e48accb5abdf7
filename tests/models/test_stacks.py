"""Weights of layers that share their input are one array, of which each layer's are views."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

from mlx_mtp.kernels.gpu import decode_pass
from mlx_mtp.models import compiled as shared
from mlx_mtp.models.compiled import compiled
from mlx_mtp.models.gemm.stacks import PARTS, stack_weights, stacked_weight
from tests.support.cases import arrays_of


class Mixer(nn.Module):
    stacked = "first", "second", "third"

    def __init__(self, **bits):
        super().__init__()
        for name, outputs in (("first", 96), ("second", 1), ("third", 40)):
            layer = nn.Linear(128, outputs, bias=False)
            self[name] = nn.QuantizedLinear.from_linear(layer, 64, bits.get(name, 4))
        sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "norm_topk_prob": True}
        sizes |= {"num_experts": 3, "num_experts_per_tok": 2}
        self.mlp = Qwen3NextSparseMoeBlock(
            SimpleNamespace(**sizes, shared_expert_intermediate_size=bits.get("shared", 64))
        )
        nn.quantize(self.mlp, 64, 4)


def parameters(module):
    return {name: mx.array(array) for name, array in tree_flatten(module.parameters())}


def test_a_stack_has_the_layers_arrays_and_takes_no_memory():
    mixer = Mixer()
    before = parameters(mixer)
    mx.eval(before)
    used = mx.get_active_memory()
    stack_weights(mixer)
    stack_weights(mixer)
    assert mx.get_active_memory() < 1.01 * used
    after = parameters(mixer)
    assert before.keys() == after.keys()
    assert all(mx.array_equal(array, after[name]) for name, array in before.items())
    first, second, third = (mixer[name] for name in Mixer.stacked)
    for layers in ((first, second, third), (second, third), (first, second)):
        weight = stacked_weight(*layers)
        for found, key in zip(weight[:3], ("weight", "scales", "biases")):
            assert mx.array_equal(found, mx.concatenate([layer[key] for layer in layers]))
    assert stacked_weight(first, third) is stacked_weight(second, first) is None
    switch, shared = mixer.mlp.switch_mlp, mixer.mlp.shared_expert
    every = stacked_weight(*(owner[name] for owner in (switch, shared) for name in PARTS))
    for number, owner in enumerate((switch, shared)):
        own = stacked_weight(*(owner[name] for name in PARTS))
        parts = mx.concatenate([owner[name].scales for name in PARTS])
        assert mx.array_equal(own.scales, parts)
        at = every.scales[6 * number : 6 * number + 6]
        assert mx.array_equal(at.reshape(parts.shape), parts)


def test_weights_of_other_formats_or_shapes_stay_apart():
    mixer = Mixer(second=8, shared=128)
    stack_weights(mixer)
    assert stacked_weight(mixer.first, mixer.second) is None
    block = mixer.mlp
    parts = [[owner[name] for name in PARTS] for owner in (block.switch_mlp, block.shared_expert)]
    assert stacked_weight(*parts[0], *parts[1]) is None
    assert all(stacked_weight(*each) is not None for each in parts)
    assert stacked_weight(block.gate, block.shared_expert_gate) is not None


class Sum(Mixer):
    def run(self, x):
        weight = stacked_weight(self.first, self.second, self.third)
        return self.second(x), weight.scales, self.mlp.shared_expert(x)


def test_compiled_modules_take_their_own_stacks(monkeypatch):
    """A step that the kernel serves takes each stack once, and makes other arrays of it."""
    monkeypatch.setattr(shared, "_compiled", {})
    monkeypatch.setattr(shared, "all_served", lambda _, rows: rows == 2)
    mixers = [Sum(), Sum()]
    given, real = [], mx.compile
    monkeypatch.setattr(mx, "compile", lambda f: lambda *a: given.append(a) or real(f)(*a))
    for mixer in mixers:
        stack_weights(mixer)
        run = compiled(mixer, "run")
        for is_step, rows in ((True, 2), (True, 3), (False, 2), (None, 2)):
            x = mx.random.normal((rows, 128))
            with decode_pass(is_step):
                found = run(x)
            assert all(mx.allclose(a, b) for a, b in zip(found, mixer.run(x), strict=True))
    assert len(shared._compiled) == 1
    counts = [len(arrays_of(arguments)) - 1 for arguments in given]
    every = 3 * (3 + 2 + 3 + 3) + 3 * 4
    assert counts == [3 * 4, every, every, every] * 2
