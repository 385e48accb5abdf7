"""Dequantizes affine weights of 4 and 8 bits, before the dense GEMM of a prompt on CUDA.

mlx's own operation takes several times as long as reading and writing the weights.
"""

import mlx.core as mx

from mlx_mtp.kernels import gpu

_BODY = """
    const int word = grid_x * 32 + lane;
    if (grid_y >= codes_shape[0] || word >= WORDS) {
      return;
    }
    constexpr int COUNT = 32 / BITS;
    struct alignas(2 * COUNT) { InT values[COUNT]; } wide;
    const size_t at = static_cast<size_t>(grid_y) * WORDS + word;
    const unsigned packed = codes[at];
    const float scale = static_cast<float>(scales[at * COUNT / GROUP]);
    const float bias = static_cast<float>(biases[at * COUNT / GROUP]);
    for (int i = 0; i < COUNT; ++i) {
      const float code = static_cast<float>(packed >> (BITS * i) & ((1 << BITS) - 1));
      wide.values[i] = static_cast<InT>(fma(code, scale, bias));
    }
    reinterpret_cast<decltype(wide)*>(full)[at] = wide;
"""

KERNEL = gpu.Kernel("expand", ["codes", "scales", "biases"], ["full"], _BODY)


def expanded(
    codes: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> mx.array:
    """Returns affine weights as numbers [N, K], in the dtype of their scales."""
    if bits not in (4, 8) or scales.dtype.size != 2:
        return mx.dequantize(codes, scales, biases, group_size, bits)
    rows, words = codes.shape
    return KERNEL(
        [codes, scales, biases],
        {"InT": scales.dtype, "WORDS": words, "GROUP": group_size, "BITS": bits},
        (-(-words // gpu.LANES), rows, 1),
        [((rows, words * 32 // bits), scales.dtype)],
    )[0]
