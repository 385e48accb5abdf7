"""Runs a kernel's source for CUDA or Metal on the CPU, a threadgroup at a time.

The source is compiled as plain C++, with shims for the built-ins of the two languages. Each lane is
a fiber: at a shuffle, a matrix product or a barrier it stores its values in a slot and yields until
the other lanes have stored theirs. So the body, the launch and the strides are the real ones, and
only the hardware is emulated.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

COMPILER = shutil.which("g++") or shutil.which("clang++")
WHY_NOT = None if COMPILER else "no C++ compiler"
if sys.platform != "linux":
    WHY_NOT = "fibers by makecontext are Linux's; a Mac runs the kernels themselves"
_TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.float16: "_Float16",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.uint8: "unsigned char",
}
_CANARY = 256

_SHIMS = r"""
// No header of C++: they would take twice as long to compile as the kernel does.
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

extern "C" {
  float fmaf(float, float, float), fmaxf(float, float), ldexpf(float, int), sqrtf(float);
  float expf(float), exp2f(float), logf(float), fabsf(float), cosf(float), sinf(float);
}
static inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
static inline float ldexp(float a, int b) { return ldexpf(a, b); }
static inline float sqrt(float a) { return sqrtf(a); }
static inline float exp(float a) { return expf(a); }
static inline float exp2(float a) { return exp2f(a); }
static inline float log(float a) { return logf(a); }
static inline float cos(float a) { return cosf(a); }
static inline float sin(float a) { return sinf(a); }
static inline float fabs(float a) { return fabsf(a); }
template <typename T> static T min(T a, T b) { return b < a ? b : a; }

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t u;
    memcpy(&u, &value, 4);
    bits = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &u, 4);
    return value;
  }
};

struct dim3 { unsigned x, y, z; };
static dim3 threadIdx, blockIdx, blockDim;
static dim3 thread_position_in_threadgroup, threadgroup_position_in_grid, thread_position_in_grid;

static const int LANES = 32, WARPS_AT_MOST = 32, MOST = LANES * WARPS_AT_MOST;
static ucontext_t contexts[MOST], unused;
static jmp_buf places[MOST], scheduler;  // swapcontext alone would be a system call a switch
static bool started[MOST], finished[MOST];
static int lane_now, lanes_in_all;
static long steps[MOST], barriers[MOST], steps_in_all[MOST], progress;
struct Values { unsigned words[6]; };
static Values slots[2][MOST];
static char stacks[MOST][1 << 16];

static void let_others() {
  if (_setjmp(places[lane_now]) == 0) _longjmp(scheduler, 1);
}

static void wait_for(const long* counts, int first, int end, long count) {
  ++progress;
  for (int lane = first; lane < end; ++lane) {
    while (counts[lane] < count) let_others();
  }
}

// All lanes of a warp leave their values; two slots in turns, as a lane may be one step ahead.
static const Values* exchange(const Values& mine) {
  const int first = lane_now / LANES * LANES;
  const long turn = steps[lane_now]++ % 2;
  slots[turn][lane_now] = mine;
  wait_for(steps, first, first + LANES, steps[lane_now]);
  return &slots[turn][first];
}

static void threadgroup_barrier() {
  ++barriers[lane_now];
  wait_for(barriers, 0, lanes_in_all, barriers[lane_now]);
}

static unsigned as_word(float value) {
  unsigned word;
  memcpy(&word, &value, 4);
  return word;
}

static float as_float(unsigned word) {
  float value;
  memcpy(&value, &word, 4);
  return value;
}

template <typename To, typename From> static To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits of another size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

static float bf16_value(uint16_t bits) { return as_float(unsigned(bits) << 16); }
static unsigned bf16_bits(float value) { return bfloat16_t(value).bits; }
static unsigned f16_bits(float value) {
  const _Float16 half = value;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
static float f16_value(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}

static float shuffle_xor(float value, int other) {
  return as_float(exchange({as_word(value)})[(lane_now % LANES) ^ other].words[0]);
}

static unsigned shuffle(unsigned word, int lane) { return exchange({word})[lane].words[0]; }

static bool any(bool mine) {
  const Values* all = exchange({mine});
  bool found = false;
  for (int lane = 0; lane < LANES; ++lane) found |= all[lane].words[0];
  return found;
}

#define __shfl_sync(mask, word, lane) shuffle(word, lane)
#define __any_sync(mask, mine) any(mine)
#define simd_shuffle_xor(value, other) shuffle_xor(value, other)
#define __shfl_xor_sync(mask, value, other) shuffle_xor(value, other)

#define thread
namespace metal {
struct simdgroup_float8x8 {
  float elements[2];
  float* thread_elements() { return elements; }
};
// A lane has two neighbours of a line of each matrix, as mlx's own kernels have them.
static int lane_of(int line, int column) {
  return line / 4 * 16 + line % 4 * 2 + column / 4 * 8 + column / 2 % 2;
}
static void simdgroup_multiply_accumulate(simdgroup_float8x8& d, const simdgroup_float8x8& a,
                                          const simdgroup_float8x8& b,
                                          const simdgroup_float8x8& c) {
  const Values* all = exchange({as_word(a.elements[0]), as_word(a.elements[1]),
                                as_word(b.elements[0]), as_word(b.elements[1])});
  for (int line = 0; line < 8; ++line) {
    for (int column = 0; column < 8; ++column) {
      if (lane_of(line, column) != lane_now % LANES) continue;
      float sum = c.elements[column % 2];
      for (int k = 0; k < 8; ++k) {
        const unsigned left = all[lane_of(line, k)].words[k % 2];
        sum += as_float(left) * as_float(all[lane_of(k, column)].words[2 + column % 2]);
      }
      d.elements[column % 2] = sum;
    }
  }
}
}

// A threadgroup runs after the other.
#define __shared__ static
#define threadgroup static
struct mem_flags { enum { mem_threadgroup, mem_device }; };
static void threadgroup_barrier(int) { threadgroup_barrier(); }
#define __device__
#define __forceinline__ inline
#define __syncthreads() threadgroup_barrier()
#define __syncwarp() exchange({})
#define __uint_as_float(word) as_float(word)
#define __int_as_float(word) as_float(word)
#define __float_as_int(value) int(as_word(value))
#define __float_as_uint(value) as_word(value)
#define __expf(value) expf(value)
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
static uint4 __ldg(const uint4* from) { return *from; }
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return (low | (uint64_t(high) << 32)) >> (by & 31);
}
static unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  const uint64_t both = a | (uint64_t(b) << 32);
  unsigned word = 0;
  for (int i = 0; i < 4; ++i) word |= unsigned(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return word;
}
"""

_RUN = r"""
static void lane_main() {
  for (;;) {
    call_body();
    finished[lane_now] = true;
    steps_in_all[lane_now] = steps[lane_now];
    // Who waits for the others waits no longer for this one.
    steps[lane_now] = barriers[lane_now] = 1L << 60;
    ++progress;
    let_others();  // The next group goes on here: a new context would take system calls.
  }
}

// False if lanes of a warp come to different steps, or all wait.
static bool run_group() {
  static dim3 group;
  static bool working;
  static int turn, place, groups;
  static long before, own;
  group = blockIdx;
  for (lane_now = 0; lane_now < lanes_in_all; ++lane_now) {
    finished[lane_now] = false;
    steps[lane_now] = barriers[lane_now] = 0;
    if (started[lane_now]) continue;
    getcontext(&contexts[lane_now]);
    contexts[lane_now].uc_stack.ss_sp = stacks[lane_now];
    contexts[lane_now].uc_stack.ss_size = sizeof(stacks[lane_now]);
    contexts[lane_now].uc_link = nullptr;
    makecontext(&contexts[lane_now], lane_main, 0);
  }
  for (working = true; working;) {
    working = false;
    before = progress;
    // A warp runs until it waits, of every second group the last one first: what no barrier orders
    // is seen.
    for (turn = 0; turn < lanes_in_all / LANES; ++turn) {
      do {
        own = progress;
        for (place = 0; place < LANES; ++place) {
          lane_now = (groups % 2 ? lanes_in_all / LANES - 1 - turn : turn) * LANES + place;
          if (finished[lane_now]) continue;
          working = true;
          threadIdx = {unsigned(lane_now % LANES), unsigned(lane_now / LANES), 0};
          thread_position_in_threadgroup = threadIdx;
          threadgroup_position_in_grid = blockIdx;
          thread_position_in_grid = {blockIdx.x * LANES + threadIdx.x,
                                     blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z};
          if (_setjmp(scheduler) != 0) continue;
          if (started[lane_now]) _longjmp(places[lane_now], 1);
          started[lane_now] = true;
          swapcontext(&unused, &contexts[lane_now]);
        }
      } while (progress != own);
    }
    if (working && progress == before) return false;
  }
  ++groups;
  for (int lane = 0; lane < lanes_in_all; ++lane) {
    if (steps_in_all[lane] != steps_in_all[lane / LANES * LANES]) return false;
  }
  return true;
}

extern "C" int run(const int* grid, const int* group, void** in, int** shapes, int64_t** strides,
                   void** out, int backwards) {
  inputs = in; all_shapes = shapes; all_strides = strides; outputs = out;
  blockDim = {unsigned(group[0]), unsigned(group[1]), unsigned(group[2])};
  lanes_in_all = group[0] * group[1];
  // CUDA launches whole groups, so that some warps lie outside of the grid.
  const unsigned x = grid[0] / LANES, y = (grid[1] + group[1] - 1) / group[1];
  const unsigned all = x * y * grid[2];
  for (unsigned i = 0; i < all; ++i) {
    const unsigned at = backwards ? all - 1 - i : i;
    blockIdx = {at % x, at / x % y, at / x / y};
    if (!run_group()) {
      memset(started, 0, sizeof(started));  // Lanes stopped within the body.
      return 1;
    }
  }
  return 0;
}
"""


def _with_includes(source):
    """Returns a source with the text of the files that it includes by an absolute path."""
    return re.sub(r'#include "(/[^"]*)"\n', lambda found: Path(found[1]).read_text(), source)


class EmulatedKernel:
    """Stands in for a kernel of `mx.fast.cuda_kernel` or `mx.fast.metal_kernel`, on the CPU."""

    both_orders = False  # also run threadgroups backwards, to find two that write to one place

    def __init__(
        self,
        folder,
        *,
        name,
        input_names,
        output_names,
        source,
        header,
        ensure_row_contiguous=True,
        shared_memory=0,
    ):
        assert shared_memory <= 1 << 18
        self._dense = ensure_row_contiguous
        self._folder = folder
        self._name = name
        self._inputs, self._outputs = input_names, output_names
        self._source, self._header = _with_includes(source), _with_includes(header)
        self._compiled = {}

    def __call__(self, *, inputs, template, grid, threadgroup, output_shapes, output_dtypes):
        assert threadgroup[0] * threadgroup[1] * threadgroup[2] <= 1024
        assert grid[0] % threadgroup[0] == 0 and threadgroup[0] == 32 and threadgroup[2] == 1
        inputs = [mx.contiguous(a) for a in inputs] if self._dense else inputs
        mx.eval(inputs)
        run = self._library(template, [a.dtype for a in inputs], output_dtypes)
        views = [memoryview(a) for a in inputs]
        addresses = [_address(a, view) for a, view in zip(inputs, views)]
        shapes = [(ctypes.c_int * v.ndim)(*v.shape) for v in views]
        strides = [(ctypes.c_int64 * v.ndim)(*(s // v.itemsize for s in v.strides)) for v in views]
        kept = None
        for backwards in (False, True)[: 1 + self.both_orders]:
            results = [
                # Elements that are not written stay NaN; a write past the end changes the canary.
                np.full(int(np.prod(shape)) * dtype.size + _CANARY, 0xFF, dtype=np.uint8)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]
            diverged = run(
                (ctypes.c_int * 3)(*grid),
                (ctypes.c_int * 3)(*threadgroup),
                (ctypes.c_void_p * len(inputs))(*addresses),
                (ctypes.c_void_p * len(inputs))(*map(ctypes.addressof, shapes)),
                (ctypes.c_void_p * len(inputs))(*map(ctypes.addressof, strides)),
                (ctypes.c_void_p * len(results))(*(r.ctypes.data for r in results)),
                backwards,
            )
            assert not diverged, f"{self._name}: lanes of a warp came to different steps"
            same = kept is None or all(map(np.array_equal, kept, results))
            assert same, f"{self._name}: the order of threadgroups matters"
            kept = results
        for name, result in zip(self._outputs, results):
            assert (result[-_CANARY:] == 0xFF).all(), f"{self._name}: {name} has been overrun"
        return [
            mx.array(result[:-_CANARY]).view(dtype).reshape(shape)
            for result, shape, dtype in zip(results, output_shapes, output_dtypes)
        ]

    def _library(self, template, input_dtypes, output_dtypes):
        text = self._text(template, input_dtypes, output_dtypes)
        if text not in self._compiled:
            stem = self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]
            path = stem.with_suffix(".cpp")
            path.write_text(text)
            command = [COMPILER, "-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
            # Multiply-adds are fused only where the source says so.
            command += ["-ffp-contract=off", "-o", str(stem.with_suffix(".so")), str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{self._name} does not compile:\n{done.stderr}")
            self._compiled[text] = ctypes.CDLL(str(stem.with_suffix(".so"))).run
        return self._compiled[text]

    def _text(self, template, input_dtypes, output_dtypes):
        constants = "\n".join(
            f"using {name} = {_TYPES[value]};"
            if isinstance(value, mx.Dtype)
            else f"constexpr int {name} = {int(value)};"
            for name, value in template
        )
        parameters, arguments = [], []
        for i, (name, dtype) in enumerate(zip(self._inputs, input_dtypes, strict=True)):
            parameters.append(f"const {_TYPES[dtype]}* {name}")
            arguments.append(f"(const {_TYPES[dtype]}*)inputs[{i}]")
            # Like mlx, declares these only if the source uses them.
            if f"{name}_shape" in self._source:
                parameters.append(f"const int* {name}_shape")
                arguments.append(f"all_shapes[{i}]")
            if f"{name}_strides" in self._source:
                parameters.append(f"const int64_t* {name}_strides")
                arguments.append(f"all_strides[{i}]")
        for i, (name, dtype) in enumerate(zip(self._outputs, output_dtypes, strict=True)):
            parameters.append(f"{_TYPES[dtype]}* {name}")
            arguments.append(f"({_TYPES[dtype]}*)outputs[{i}]")
        return "\n".join(
            [
                _SHIMS,
                "static void **inputs, **outputs;",
                "static int** all_shapes;",
                "static int64_t** all_strides;",
                self._header,
                constants,
                f"static void body({', '.join(parameters)}) {{\n{self._source}\n}}",
                f"static void call_body() {{ body({', '.join(arguments)}); }}",
                _RUN,
            ]
        )


def _address(array, view):
    """Returns the first element's address in the real array: a copy could hide wrong strides."""
    if 0 in view.shape:
        return 0
    flat = array if array.dtype != mx.bfloat16 else array.view(mx.uint16)
    mx.eval(flat)
    return int(np.array(flat, copy=False).__array_interface__["data"][0])
