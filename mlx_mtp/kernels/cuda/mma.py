"""Hardware instructions of the kernels that are for CUDA only; the tests have them in C++.

m16n8k16 products of the tensor cores, asynchronous copies to shared memory, and pairs of numbers.
"""

import itertools

import mlx.core as mx

CUDA = r"""
#define SHARED(name) extern __shared__ __align__(16) unsigned char name[]
// c (16 x 8, float32) += a (16 x 16) times b (16 x 8), both bfloat16.
__device__ __forceinline__ void multiply(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four matrices of 8 x 8 numbers of 16 bits, as operands of `multiply`: lane l has the address of
// row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned* to, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}
__device__ __forceinline__ void load_transposed(unsigned* to, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from));
}
template <int bytes>
__device__ __forceinline__ void copy(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "n"(bytes));
}
// Two products of bfloat16 each.
__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {
  unsigned c;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(0x80008000u));
  return c;
}
// Two bfloat16 in each.
__device__ __forceinline__ unsigned multiply_add(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int left>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(left)); }
"""

# The same for a warpgroup, four warps, on Hopper. Products run asynchronously until they are waited
# for; `hold` keeps the compiler from using their registers before that.
WARPGROUP = r"""
template <int n>
__device__ __forceinline__ void hold(float (&x)[n]) {
  #pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i]) :: "memory");
}
template <int n>
__device__ __forceinline__ void hold(unsigned (&x)[n]) {
  #pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(x[i]) :: "memory");
}
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int left>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(left) : "memory");
}
// What this thread has copied to shared memory is seen by products after the next barrier.
__device__ __forceinline__ void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ float power(float x) {  // of two
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ unsigned packed(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
"""
# Describes a matrix in shared memory to `wgmma`: rows of 128 bytes, in which a unit of 16 bytes is
# at its number XOR the row's; `across` bytes from 64 columns to the next, `down` from 8 rows to the
# next.
MATRIX = r"""
__device__ __forceinline__ unsigned long long matrix(const void* at, int across, int down) {
  const unsigned low = ((unsigned)__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | across >> 4 << 16;
  return (unsigned long long)(1u << 30 | down >> 4) << 32 | low;
}
"""


def header(dtype: mx.Dtype, more: str = "") -> str:
    """Returns `CUDA` and `more` for activations of this type, bfloat16 or float16."""
    return CUDA + more if dtype == mx.bfloat16 else (CUDA + more).replace("bf16", "f16")


def bounds(threads: int, blocks: int) -> str:
    """Returns source that limits registers so that `blocks` blocks fit an SM.

    mlx has no option for this.
    """
    attributes = f"__attribute__((global)) __launch_bounds__({threads}, {blocks})"
    return f"#undef __global__\n#define __global__ {attributes}\n"


def wgmma(block: int, dim: int) -> str:
    """Returns products of a warpgroup: scores, 64 x `block`, and outputs, 64 x `dim`, 16 deep.

    The depth of 16 is the right operand's columns for scores, and its rows for outputs.
    """
    return (
        WARPGROUP
        + MATRIX
        + _product_source(block, in_registers=False)
        + _product_source(dim, in_registers=True)
    )


def _product_source(columns: int, in_registers: bool) -> str:
    """c (64 x columns, float32) += a (64 x 16) b (16 x columns); c = a b if `add` is 0."""
    count = columns // 2
    place = itertools.count(count)
    if in_registers:
        parameter, left, transposed = "const unsigned* a", "{%s}", "1"
        values = [f'"r"(a[{i}])' for i in range(4)]
    else:
        parameter, left, transposed = "unsigned long long a", "%s", "0, 0"
        values = ['"l"(a)']
    left = left % ",".join(f"%{next(place)}" for _ in values)
    c = ",".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply(
    float (&c)[{count}], {parameter}, unsigned long long b, int add = 1) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + len(values) + 1}, 0; "
               "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
               "{{{c}}}, {left}, %{count + len(values)}, p, 1, 1, {transposed}; }}"
               : {outputs}
               : {", ".join(values)}, "l"(b), "r"(add));
}}
"""
