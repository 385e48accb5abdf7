"""Parses kernels as Metal's compiler would: as C++ in which pointers have their address spaces.

The source is assembled as by mlx's Metal backend (`write_signature` in mlx's metal_kernel.cpp) for
the given inputs: those of fewer than eight numbers are `constant`. Only the declarations here are
known, so kernels can use nothing else of Metal's library.
"""

import functools
import re

import mlx.core as mx
from clang.cindex import Diagnostic, Index

from mlx_mtp.kernels import gpu
from tests.kernels.emulator import EmulatedKernel

_CONSTANT_BELOW = 8
_MOST_BUFFERS = 31  # per launch
_TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.float16: "float16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
}
_POSITIONS = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
)
_OPTIONS = ["--target=x86_64-linux-gnu", "-std=c++14", "-Werror=c++17-extensions", "-Werror=vla"]
# Faults that clang accepts: a pointer without an address space, a double (slow on CUDA), and names
# that Metal reserves.
_NEVER = {
    "no address space": r"(?<!device )(?<!constant )(?<!thread )\b(float|T|u?int(\d+_t)?)[*&] ",
    "a double": r"\b\d+\.\d*(e-?\d+)?(?![\dfe])",
    "reserved": r"\b(half|kernel|vertex|fragment|sampler)\b",
}
_DECLARATIONS = r"""
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup static __attribute__((address_space(3)))
#define thread
#define double there_is_no_double
typedef unsigned char uint8_t;
typedef unsigned short ushort;
typedef int int32_t;
typedef unsigned uint, uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t, size_t;
typedef _Float16 half, float16_t;
typedef __bf16 bfloat, bfloat16_t;
namespace metal {
typedef float float2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
float fma(float, float, float), ldexp(float, int);
half fma(half, half, half), ldexp(half, int);
float exp(float), exp2(float), log(float), sqrt(float), cos(float), sin(float), fabs(float);
half exp(half), exp2(half), log(half), sqrt(half), cos(half), sin(half), fabs(half);
template <typename T> T min(T, T);
template <typename To, typename From> To as_type(From);
template <typename T> T simd_shuffle_xor(T, ushort);
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
struct simdgroup_float8x8 {
  float2 elements;
  float2& thread_elements() { return elements; }
};
void simdgroup_multiply_accumulate(simdgroup_float8x8&, simdgroup_float8x8, simdgroup_float8x8,
                                   simdgroup_float8x8);
}
using namespace metal;
"""


class MetalKernel(EmulatedKernel):
    """A kernel whose body is also used on Metal: it is run, and parsed as Metal's source."""

    def __call__(self, *, inputs, template, output_dtypes, **how):
        given = {"inputs": inputs, "template": template, "output_dtypes": output_dtypes}
        results = super().__call__(**given, **how)
        if (header := _as_metal(self._header)) is not None:
            found = problems(self._metal_text(header, inputs, template, output_dtypes))
            assert not found, f"{self._name} is no Metal:\n{found}"
        return results

    def _metal_text(self, header, inputs, template, output_dtypes):
        source = self._source.replace(
            gpu.lean(gpu._PROLOGUES["cuda"]), gpu.lean(gpu._PROLOGUES["metal"])
        )
        parameters = []
        for name, array in zip(self._inputs, inputs, strict=True):
            place = "constant" if array.size < _CONSTANT_BELOW else "device"
            kind = "*" if array.ndim else "&"
            parameters.append(f"const {place} {_TYPES[array.dtype]}{kind} {name}")
            for more, of in ((f"{name}_shape", "int"), (f"{name}_strides", "int64_t")):
                if array.ndim and more in source:
                    parameters.append(f"const constant {of}* {more}")
        pairs = zip(self._outputs, output_dtypes, strict=True)
        parameters += [f"device {_TYPES[dtype]}* {name}" for name, dtype in pairs]
        assert len(parameters) <= _MOST_BUFFERS, f"{self._name} has {len(parameters)} buffers"
        parameters += [f"uint3 {name}" for name in _POSITIONS if name in source]
        names, values = [], []
        for name, value in template:
            kind = "typename" if isinstance(value, mx.Dtype) else type(value).__name__
            names.append(f"{kind} {name}")
            values.append(_TYPES[value] if kind == "typename" else str(value).lower())
        body = f"void body({', '.join(parameters)}) {{\n{source}}}\n"
        used = f"auto used = &body<{', '.join(values)}>;\n"
        return f"{header}template <{', '.join(names)}>\n{body}{used}" if names else header + body


@functools.cache
def problems(text):
    """Returns the errors in a source, each with its line; empty if there are none."""
    file = ("kernel.cpp", _DECLARATIONS + text)
    unit = Index.create().parse(file[0], _OPTIONS, unsaved_files=[file])
    lines = file[1].split("\n")
    found = [
        f"{each.spelling}: {lines[each.location.line - 1]}"
        for each in unit.diagnostics
        if each.severity >= Diagnostic.Error
    ]
    for line in text.split("\n"):
        found += [f"{why}: {line}" for why, pattern in _NEVER.items() if re.search(pattern, line)]
    return "\n".join(found)


def _as_metal(header):
    """Returns the header for Metal, with its memory limit; None if the header has CUDA's code."""
    if header == gpu.lean(gpu._HEADERS["cuda"]):
        header = gpu.lean(gpu._HEADERS["metal"])
    array = "threadgroup type name[size]"
    limit = 'static_assert(sizeof(type) * (size) <= 32 << 10, "is more than Metal has")'
    return header.replace(array, f"{limit}; {array}") if array in header else None
