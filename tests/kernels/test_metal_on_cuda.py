"""The bodies of Metal's kernels for exact answers are right on CUDA, in real parallel.

Metal has another compiler, so this shows nothing about a Mac's bits.
"""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.formats import weight_of
from mlx_mtp.kernels.metal import skinny_gemm, window_attention
from mlx_mtp.kernels.row_check import ROWS, same_rows
from mlx_mtp.kernels.skinny_gemm import SkinnyGemm
from tests.kernels.gemms import stacked

FORMS = [("affine", bits, group) for bits in (4, 5, 6, 8) for group in (32, 64, 128)]
FORMS += [("affine", 2, 64), ("affine", 3, 64)]
FORMS += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
# Each is a kernel of its own, which takes ten seconds to compile.
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(gpu.backend() != "cuda", reason="mlx has no CUDA here"),
]


@pytest.mark.parametrize(("mode", "bits", "group"), FORMS)
def test_products_on_a_real_gpu(mode: str, bits: int, group: int) -> None:
    """Products are right, and a row's bits do not depend on the others, also with SwiGLU."""
    mx.random.seed(bits)
    layers = [nn.Linear(2048, 1024, bias=False) for _ in range(2)]
    for layer in layers:
        layer.set_dtype(mx.bfloat16)
    both = [nn.QuantizedLinear.from_linear(layer, group, bits, mode=mode) for layer in layers]
    gate, up = map(weight_of, both)
    x = mx.random.normal((2 * ROWS[-1], 2048)).astype(mx.bfloat16)

    def run(rows: slice) -> list[mx.array]:
        gemms = SkinnyGemm(x[rows], gate), SkinnyGemm(x[rows], stacked([gate, up]), 2)
        return [skinny_gemm.run_kernel(each._replace(one_order=True)) for each in gemms]

    parts = [both[0].weight, both[0].scales, both[0].get("biases")]
    weight = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    true = x[:8].astype(mx.float32) @ weight.T
    error = mx.abs(run(slice(0, 8))[0].astype(mx.float32) - true).max() / mx.abs(true).max()
    assert error.item() < 0.01 and same_rows(run)  # BF16 rounds to 0.004


@pytest.mark.parametrize("heads", [(16, 2, 256), (24, 4, 256), (32, 8, 128), (4, 2, 64)])
def test_attention_on_a_real_gpu(heads: tuple[int, int, int]) -> None:
    """Windows of 1 to 17 tokens are right; `heads` are query heads, KV heads and dimension."""
    assert window_attention.BLOCK_ATTENTION.error(heads, mx.bfloat16) < gpu.TOLERANCE
