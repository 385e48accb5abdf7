"""Storage formats of weights: mlx's quantizations, and plain 16-bit numbers.

`DECODING` is the part of the skinny GEMM for CUDA that depends on the format.
"""

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

# mlx's types by their names in safetensors files; no others are read.
FLOATS = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
TYPES = {**FLOATS, "U32": mx.uint32, "U8": mx.uint8}
# By mode: the possible bits of a code, and the possible numbers of columns that share a scale.
_KNOWN: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
    "plain": ((16,), (64,)),  # bfloat16 or float16: there are no groups
}


class Format(NamedTuple):
    """A mode, bits per weight, and columns that share a scale."""

    mode: str  # as mlx calls it, or "plain"
    bits: int
    group_size: int

    @property
    def known(self) -> bool:
        bits, group_sizes = _KNOWN.get(self.mode, ((), ()))
        return self.bits in bits and self.group_size in group_sizes


class Weight(NamedTuple):
    """A weight [.., N, K]; a format without scales or biases repeats its last array."""

    codes: mx.array
    scales: mx.array
    biases: mx.array
    form: Format

    @classmethod
    def of(cls, arrays: Mapping[str, mx.array], form: Format) -> "Weight":
        """Returns the weight of arrays with the names that they have in mlx's layers."""
        codes = arrays["weight"]
        scales = arrays.get("scales", codes)
        return cls(codes, scales, arrays.get("biases", scales), form)

    @property
    def inputs(self) -> int:
        bits = 8 * self.codes.itemsize
        return self.codes.shape[-1] * bits // self.form.bits

    def is_of(self, dtype: mx.Dtype) -> bool:
        """Returns whether the format is known, for activations of type `dtype`."""
        return self.form.known and self.scales.dtype in (dtype, mx.uint8)


def weight_of(layer: nn.Module) -> Weight:
    """Returns the weight of a linear layer, an embedding or stacked experts."""
    form = "plain", 8 * layer["weight"].itemsize, 64
    if "scales" in layer:
        form = layer.mode, layer.bits, layer.group_size
    return Weight.of(layer, Format(*form))


# A code OR-ed into the bits of BASE is the number BASE + code; ONES and BASES hold two numbers.
BASES = {
    mx.bfloat16: "#define ONES 0x3f803f80u\n#define BASES 0x43004300u\n#define BASE 128.0f\n",
    mx.float16: "#define ONES 0x3c003c00u\n#define BASES 0x64006400u\n#define BASE 1024.0f\n",
}
# Source of `cuda.skinny_gemm`, after `mma.header`. A lane has runs of eight columns. A mask selects
# two codes: 0 and 4, 1 and 5, 2 and 6, 3 and 7; of 8 bits 0 and 2, 1 and 3, 4 and 6, 5 and 7.
DECODING = r"""
template <typename V, int count>
struct alignas(sizeof(V) * count) Vector { V at[count]; };

// The codes of a run, which begins at a byte of the first word: pair i is at bit BITS * (i % 2) of
// word i / 2, and 16 bits higher; numbers are as they are.
template <int BITS>
__device__ __forceinline__ void load_run(unsigned* run, const unsigned char* from, int byte) {
  const unsigned* words = reinterpret_cast<const unsigned*>(from);
  if constexpr (BITS >= 8) {
    const auto found = *reinterpret_cast<const Vector<unsigned, BITS / 4>*>(words);
    for (int i = 0; i < BITS / 4; ++i) run[i] = found.at[i];
  } else if constexpr (BITS == 4) {
    run[0] = words[0], run[1] = words[0] >> 8;
  } else {
    const unsigned low = __funnelshift_r(words[0], words[1], 8 * byte);
    const unsigned high = __funnelshift_r(low, words[1] >> 8 * byte, 4 * BITS);
    run[0] = __byte_perm(low, high, 0x5410);
    run[1] = __byte_perm(low >> 2 * BITS, high >> 2 * BITS, 0x5410);
  }
}
// Eight numbers of x in the same order.
template <int BITS>
__device__ __forceinline__ void load_x(unsigned* b, uint4 q) {
  if constexpr (BITS == 16) {
    b[0] = q.x, b[1] = q.y, b[2] = q.z, b[3] = q.w;
  } else {
    const unsigned upper = BITS == 8 ? q.y : q.z, lower = BITS == 8 ? q.z : q.y;
    b[0] = __byte_perm(q.x, upper, 0x5410), b[1] = __byte_perm(q.x, upper, 0x7632);
    b[2] = __byte_perm(lower, q.w, 0x5410), b[3] = __byte_perm(lower, q.w, 0x7632);
  }
}
// Pair i as two numbers. Affine: BASE + q, exact, with one operation; a code of 8 bits is two of 4.
// mxfp and nvfp: the number itself times 2^-UP, which with its scale has few enough digits.
template <int BITS, bool AFFINE>
__device__ __forceinline__ unsigned numbers(const unsigned* run, int i, int h, unsigned scale) {
  if constexpr (BITS == 16) return run[i];
  const unsigned codes = run[i / 2] >> i % 2 * BITS;
  constexpr unsigned most = (1 << (AFFINE ? BITS == 8 ? 4 : BITS : BITS - 1)) - 1;
  if constexpr (AFFINE) return (codes >> 4 * h & most * 0x10001u) | BASES;
  constexpr int up = 8 - BITS / 2;
  const unsigned sign = codes << (16 - BITS) & 0x80008000u;
  return times((codes << up & (most << up) * 0x10001u) | sign, scale);
}
// The scale of such a format times 2^(bias - UP), twice; a number's bits lack 2^bias.
template <int BITS, int GROUP>
__device__ __forceinline__ unsigned scale_of(unsigned code) {
  if constexpr (GROUP == 16) {  // an e4m3, else a power of two
    code = __float_as_uint(__uint_as_float(code << 20) * 0x1p120f * 0x1p63f) >> 16;
  } else {
    code = code + (BITS == 4 ? 63 : 60) << 7;
  }
  return code * 0x10001u;
}
"""
