"""Metal's kernel bodies on a GPU of NVIDIA: whether they are right, and rows by themselves.

    python scripts/metal_bodies.py          # two minutes, most of which compiles kernels

It needs mlx and mlx-lm alone. `exact` is what Metal runs with --exact; there mlx's compiler is
another one, so this says nothing about a Mac but that the bodies are right in real parallel.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.kernels import gpu, topk
from mlx_mtp.kernels.formats import weight_of
from mlx_mtp.kernels.metal import skinny_gemm, window_attention
from mlx_mtp.kernels.row_check import ROWS, same_rows
from mlx_mtp.kernels.skinny_gemm import SkinnyGemm

FORMS = [("affine", bits, group) for bits in (4, 5, 6, 8) for group in (32, 64, 128)]
FORMS += [
    ("affine", 2, 64),
    ("affine", 3, 64),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]
HEADS = [(16, 2, 256), (24, 4, 256), (32, 8, 128), (4, 2, 64)]


def product(mode: str, bits: int, group: int) -> str:
    """Of 2,048 inputs and 1,024 outputs, plain and with gate, up and SwiGLU."""
    mx.random.seed(bits)
    layers = [nn.Linear(2048, 1024, bias=False) for _ in range(2)]
    for layer in layers:
        layer.set_dtype(mx.bfloat16)
    both = [nn.QuantizedLinear.from_linear(layer, group, bits, mode=mode) for layer in layers]
    gate, up = map(weight_of, both)
    x = mx.random.normal((2 * ROWS[-1], 2048)).astype(mx.bfloat16)

    def run(rows: slice) -> list[mx.array]:
        plain = skinny_gemm.run_kernel(SkinnyGemm(x[rows], [gate], one_order=True))
        return plain + skinny_gemm.run_kernel(SkinnyGemm(x[rows], [gate, up], 2, one_order=True))

    parts = [both[0].weight, both[0].scales, both[0].get("biases")]
    weight = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    true = x[:8].astype(mx.float32) @ weight.T
    error = mx.abs(run(slice(0, 8))[0].astype(mx.float32) - true).max() / mx.abs(true).max()
    return f"off by {error.item():.1e}, {'exact' if same_rows(run) else 'ROWS DEPEND'}"


def attention(*heads: int) -> str:
    """Windows of 1 to 17 tokens, by heads of queries and of KV and their dimension."""
    error = window_attention.BLOCK_ATTENTION.error(heads, mx.bfloat16)
    return f"off by {error:.1e}, exact" if error < gpu.TOLERANCE else f"WRONG, off by {error:.1e}"


def router(experts: int, chosen: int, rows: int) -> str:
    """Which experts, their order, and the time."""
    kind = topk.Router(experts, chosen, True)
    logits, gate = mx.random.normal((rows, experts)), mx.random.normal((rows, 1))
    found, true = topk.run_kernel(logits, gate, kind), topk.portable(logits, gate, kind)
    same = all(mx.array_equal(a, b).item() for a, b in zip(found[2:], true[2:]))
    began, calls = time.perf_counter(), 50
    mx.eval([topk.run_kernel(logits + i, gate, kind) for i in range(calls)])
    took = 1e6 * (time.perf_counter() - began) / calls
    return f"{'right' if same else 'WRONG'}, {took:.0f} us a call with its input's sum"


def main() -> None:
    """Print a line for each case."""
    cases = [(product, form) for form in FORMS] + [(attention, heads) for heads in HEADS]
    cases += [(router, (512, 10, rows)) for rows in (1, 16, 128, 1000)]
    print(gpu.backend(), mx.__version__)
    for check, given in cases:
        began = time.perf_counter()
        try:
            result = check(*given)
        except Exception as error:
            result = f"FAILED: {type(error).__name__}: {str(error)[:200]}"
        print(check.__name__, given, result, f"{time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
