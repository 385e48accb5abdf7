"""Products of a decode step whose operation always sees as many rows, where no kernel serves them.

mlx chooses another kernel, and so another order of sums, for another number of rows. Beside a fixed
number of them, and wherever it stands, a row has the same bits. Reading the weights is most of
what a product of few rows takes, so of unquantized weights this costs little.
"""

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_mtp.kernels.gpu import MOST_PROMPT_ROWS, MOST_ROWS, backend, refused
from mlx_mtp.models.dequant_gemm import ExpandedLinear, GroupedExperts
from mlx_mtp.models.skinny_gemm import (
    REPLACED,
    FewRowsMLP,
    FewRowsPlainEmbedding,
    FewRowsPlainLinear,
    few,
)

_BLOCK = 64  # rows


def use_fixed_rows(model: nn.Module) -> None:
    """Let what `use_few_rows` has left compute the tokens of a step in blocks of one size."""
    if backend() is None:
        return
    for module in model.modules():
        if type(module) is FewRowsMLP and "scales" not in module.gate_proj:
            module.__class__ = Qwen3NextMLP
        module.__class__ = _FIXED.get(type(module), type(module))
        if isinstance(module, (ExpandedLinear, GroupedExperts)) and module.least_rows < math.inf:
            # Not as measured: prefixes on disk outlive a process.
            is_dense = isinstance(module, ExpandedLinear)
            module.least_rows = 1 + (MOST_PROMPT_ROWS if is_dense else MOST_ROWS)


def choices(model: nn.Module) -> str:
    """Which operations a loaded model uses, where measurement chose them: equal for equal ones."""
    measured = "least_rows", "served"
    layers = [
        (name, type(module).__name__, *(getattr(module, key, None) for key in measured))
        for name, module in model.named_modules()
    ]
    return hashlib.sha256(str((sorted(layers), sorted(refused))).encode()).hexdigest()


def _in_blocks(call: Callable[..., Any], *inputs: mx.array) -> mx.array:
    """Call it for tokens, each [.., width], in blocks of as many rows; the last one is padded."""
    shape = inputs[0].shape[:-1]
    rows = [each.reshape(-1, each.shape[-1]) for each in inputs]
    count = len(rows[0])
    rows = [mx.pad(each, [(0, -count % _BLOCK), (0, 0)]) for each in rows]
    blocks = [call(*(a[at : at + _BLOCK] for a in rows)) for at in range(0, count, _BLOCK)]
    found = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks)
    return found[:count].reshape(*shape, *found.shape[1:])


def _fixed(base: type[Any], name: str) -> type[Any]:
    """A subclass whose method of this name works so."""
    usual = getattr(base, name)

    def call(self: Any, x: mx.array, *rest: mx.array) -> mx.array:
        bound = functools.partial(usual, self)
        found: mx.array = _in_blocks(bound, x, *rest) if few(x) else bound(x, *rest)
        return found

    return type(f"Fixed{base.__name__}", (base,), {name: call})


_PRODUCTS = nn.Linear, nn.QuantizedLinear, ExpandedLinear, SwitchGLU, GroupedExperts
_TIED = nn.Embedding, nn.QuantizedEmbedding
_FIXED: dict[type[Any], type[Any]] = {base: _fixed(base, "__call__") for base in _PRODUCTS}
_FIXED |= {base: _fixed(base, "as_linear") for base in _TIED}
# Those kernels are for so few rows that a step may have more.
_FIXED |= {ours: _FIXED[REPLACED[ours]] for ours in (FewRowsPlainLinear, FewRowsPlainEmbedding)}
