"""Kernels for a GPU, each beside the mlx operations that run where it is not used.

    module        what one launch computes                                   for
    gated_delta   fold of a window's kept prefix, recurrence of the next     any GPU
    inputs        convolution, silu, norms and gates before it               any GPU
    norms         RMS norm with the sum before it, gate or RoPE behind it    any GPU
    router        top-k experts, their weights, pairs sorted by expert       any GPU, decode steps
    few_rows      GEMMs of few rows with one input; gate, up, SwiGLU;        CUDA, decode steps
                  experts, by pairs sorted by expert
    attention     attention of windows, split over the KV                    CUDA, decode steps
    grouped       grouped GEMM of experts, 4 bit                             CUDA, prompts
    expand        dequantization before a dense GEMM                         CUDA, prompts
    few_rows_metal  the same of up to sixteen rows; experts                  Metal, decode steps

What is a decode step `gpu.few` says: rows with windows of up to 17 each, up to 64 tokens of a
prompt, and up to 128 where nobody says what they are.

Who decides: the first four and attention are compared with other code before their first use with
a shape and type (`gpu.Kernel.works`, `attention.fits`); `portable`, or mlx's operations in the same
module or in `cache.kv`, run instead. The products are compared and timed when a model is loaded, by
`models.few_rows` and `models.many_rows`; mlx's product runs instead.
"""
