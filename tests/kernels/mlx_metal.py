"""Runs mlx's own Metal kernels in the emulator, from the headers of the `mlx-metal` wheel.

pip fetches the wheel of the installed version. Address spaces and attributes are removed from the
headers, and the functions of Metal's library are declared here. The order in which the hardware
adds up a simdgroup (`simd_sum`) is unknown; here it is a butterfly. So the emulator shows which
numbers a result depends on, and in which order other sums are, but not the bits of a Mac.
"""

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from tests.kernels.emulator import _RUN, _SHIMS, EmulatedKernel

_KERNELS = "mlx/include/mlx/backend/metal/kernels/"
_LIBRARY = r"""
typedef _Float16 half;
typedef _Float16 float16_t;
typedef unsigned uint;
typedef unsigned short ushort;
struct uint3 { uint x, y, z; };
struct short2 { short x, y; };
template <typename T> static T max(T a, T b) { return a < b ? b : a; }
extern "C" {
  float log2f(float), roundf(float);
}
namespace metal {
namespace fast {
static float exp(float a) { return expf(a); }
}
static bool isnan(float a) { return a != a; }
static bool signbit(float a) { return as_word(a) >> 31; }
static bool isfinite(float a) { return a - a == 0.0f; }
static float abs(float a) { return fabsf(a); }
static float log2(float a) { return log2f(a); }
static float round(float a) { return roundf(a); }
template <typename T, int N> struct vec { T at[N]; };
struct four {
  float x, y, z, w;
  four() = default;
  four(float a, float b, float c, float d) : x(a), y(b), z(c), w(d) {}
  template <typename T> four(const vec<T, 4>& v) : four(v.at[0], v.at[1], v.at[2], v.at[3]) {}
};
static float dot(four a, four b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
}
using namespace metal;
namespace fast = metal::fast;
template <typename T> static T select(T no, T yes, bool which) { return which ? yes : no; }
template <typename T> static T clamp(T a, T low, T high) { return min(max(a, low), high); }
template <typename T> struct Limits {
  static constexpr float min = -__builtin_inff(), finite_min = -3.4028234e38f;
};
static bool isinf(float a) { return a - a != 0.0f && a == a; }
template <typename T, typename U> static T ceildiv(T a, U b) { return (a + b - 1) / b; }
template <typename U, typename T> static U cast_to(T value) { return U(value); }
static float simd_sum(float value) {
  for (int other = 16; other > 0; other /= 2) value += shuffle_xor(value, other);
  return value;
}
static float quad_sum(float value) {
  for (int other = 2; other > 0; other /= 2) value += shuffle_xor(value, other);
  return value;
}
static float simd_max(float value) {
  for (int other = 16; other > 0; other /= 2) value = max(value, shuffle_xor(value, other));
  return value;
}
static float simd_prefix_exclusive_sum(float value) {
  const Values* all = exchange({as_word(value)});
  float sum = 0.0f;
  for (int lane = 0; lane < lane_now % LANES; ++lane) sum += as_float(all[lane].words[0]);
  return sum;
}
static float simd_shuffle_down(float value, int by) {
  const Values* all = exchange({as_word(value)});
  const int from = lane_now % LANES + by;
  return as_float(all[from < LANES ? from : lane_now % LANES].words[0]);
}
// Of the headers with operators, which have atomics that no C++ compiler knows.
static const int simd_size = LANES;
struct Sum {
  static constexpr float init = 0.0f;
  float operator()(float a, float b) { return a + b; }
  float simd_reduce(float a) { return simd_sum(a); }
  float simd_exclusive_scan(float a) { return simd_prefix_exclusive_sum(a); }
};
struct Max {
  static constexpr float init = -__builtin_inff();
  float operator()(float a, float b) { return a > b ? a : b; }
  float simd_reduce(float a) { return simd_max(a); }
};
#define METAL_FUNC static inline
#define MLX_MTL_CONST static constexpr const
#define MLX_MTL_PRAGMA_UNROLL
static uint3 tid, tpg, tptg, tidtg;
static uint simd_gid, simd_lid;
"""
_WHERE = r"""
static void call_body() {
  const int* number = (const int*)inputs[NUMBERS];
  const int wide = number[0];  // a threadgroup's second dimension; the third follows
  auto at = [&] {
    tid = {blockIdx.x, blockIdx.y, blockIdx.z};
    tpg = {uint(number[1]), uint(number[2]), uint(number[3])};
    tptg = {32, uint(wide), uint(blockDim.y / wide)};
    tidtg = {threadIdx.x, threadIdx.y % wide, threadIdx.y / wide};
    simd_gid = threadIdx.y;
    simd_lid = threadIdx.x;
  };
  at();
  CALL;
}
"""


def fetch(folder: Path) -> Path:
    """Download the installed version's wheel; returns its folder of kernels. Raises OSError."""
    wanted = f"mlx-metal=={metadata.version('mlx')}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--only-binary=:all:", "--platform", "macosx_14_0_arm64"]
    done = subprocess.run([*command, wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{wanted} can't be had: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, [n for n in wheel.namelist() if n.startswith(_KERNELS)])
    return folder / _KERNELS


def as_cpp(text: str) -> str:
    """Returns a Metal header as C++ for the emulator."""
    text = re.sub(r"\[\[.*?\]\]", "", text, flags=re.DOTALL)
    text = re.sub(r"^#(include|pragma once).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^constant (\w+) (\w+)\s*;", r"static \1 \2;", text, flags=re.MULTILINE)
    text = re.sub(r"\bthreadgroup (\w+) (\w+)\[", r"static \1 \2[", text)
    text = re.sub(r"\b(device|constant|threadgroup|thread)\b(?! *\()", "", text)
    return text.replace("using namespace metal;", "").replace("float4", "four")


class MlxKernel(EmulatedKernel):
    """A function of mlx's headers; `source` calls it, with `inputs`, `outputs` and `number`.

    `number` holds the ints of the last input: a threadgroup's second dimension, the number of
    threadgroups in each dimension, and the arguments of the call.
    """

    def _text(self, template, input_dtypes, output_dtypes):
        call = _WHERE.replace("NUMBERS", str(len(input_dtypes) - 1)).replace("CALL", self._source)
        storage = "static void **inputs, **outputs;\nstatic int** all_shapes;\n"
        storage += "static int64_t** all_strides;\n"
        return "\n".join([_SHIMS, _LIBRARY, self._header, storage, call, _RUN])


def part(text: str, first: str, last: str) -> str:
    """Returns the text from `first` to the template before `last`."""
    end = text.rindex("template <", 0, text.index(last))
    return text[text.index(first) : end]
