"""What the kernels for CUDA alone need of the hardware; the tests have it in C++.

m16n8k16 products of the tensor cores, asynchronous copies to shared memory, and pairs of numbers.
"""

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


def header(dtype: mx.Dtype) -> str:
    """The same for activations of this type, bfloat16 or float16."""
    return CUDA if dtype == mx.bfloat16 else CUDA.replace("bf16", "f16")


def bounds(threads: int, blocks: int) -> str:
    """Registers for so many blocks an SM: mlx has no way to say how many a thread may have."""
    attributes = f"__attribute__((global)) __launch_bounds__({threads}, {blocks})"
    return f"#undef __global__\n#define __global__ {attributes}\n"
