"""Products of a step in blocks of one size: the same results, in shapes that do not vary."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_mtp.kernels import gpu
from mlx_mtp.models import batch_invariant
from mlx_mtp.models.dequant_gemm import ExpandedLinear
from mlx_mtp.models.skinny_gemm import FewRowsLinear


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(64, 96, bias=False)
        self.quantized = nn.QuantizedLinear(64, 96)
        self.expanded = ExpandedLinear(64, 96)
        self.experts = SwitchGLU(64, 32, 4)
        self.tied = nn.Embedding(96, 64)


@pytest.mark.parametrize("rows", [1, 3, 64, 65, 130])
def test_a_step_sees_blocks_of_one_size_and_a_prompt_what_it_has(monkeypatch, rows):
    model, seen = Model(), []
    x = mx.random.normal((1, rows, 64), key=mx.random.key(0))
    chosen = mx.arange(2 * rows, dtype=mx.uint32).reshape(1, rows, 2) % 4
    calls = {
        "plain": (x,),
        "quantized": (x,),
        "expanded": (x,),
        "experts": (x, chosen),
        "tied": (x,),
    }
    true = {}
    for name, given in calls.items():
        module = getattr(model, name)
        true[name] = (module.as_linear if name == "tied" else module)(*given)
    monkeypatch.setattr(batch_invariant, "backend", lambda: "cuda")
    blocks = batch_invariant._in_blocks
    monkeypatch.setattr(
        batch_invariant,
        "_in_blocks",
        lambda call, *inputs: blocks(lambda *a: seen.append(len(a[0])) or call(*a), *inputs),
    )
    batch_invariant.use_fixed_rows(model)
    for step in (True, False):
        for name, given in calls.items():
            seen.clear()
            module = getattr(model, name)
            with gpu.step(step):
                found = (module.as_linear if name == "tied" else module)(*given)
            assert found.shape == true[name].shape
            assert mx.allclose(found, true[name], atol=1e-5).item()
            few = step or rows <= gpu.MOST_PROMPT_ROWS
            assert seen == ([64] * -(-rows // 64) if few else [])


def test_choices_are_told_apart(monkeypatch):
    """A layer's kernel, from how many rows on it expands its weights, and kernels that fail."""
    model, found = Model(), []
    found.append(batch_invariant.choices(model))
    model.quantized.__class__, model.quantized.served = FewRowsLinear, range(1, 129)
    found.append(batch_invariant.choices(model))
    model.expanded.least_rows = 128
    found.append(batch_invariant.choices(model))
    monkeypatch.setattr(gpu, "backend", lambda: "cuda")
    monkeypatch.setattr(gpu, "refused", gpu.refused.copy())
    monkeypatch.setattr(batch_invariant, "refused", gpu.refused)
    assert not gpu.Operation("of this test", lambda *_: 1.0, lambda *_: True).works(0, mx.float32)
    found.append(batch_invariant.choices(model))
    assert len({*found}) == 4
    assert batch_invariant.choices(model) == found[-1]
