"""Kernels for GPUs, each with the mlx operations that run where the kernel can't; `cpu` and
`activations` are for small models on a CPU.

  module                  what one launch computes                               for
  gated_delta             fold of a window's kept prefix, recurrence of the next any GPU
  short_conv              convolution, silu, norms and gates before it           any GPU
  gated_delta_step        both of these and the outputs' gated norm              any GPU, few rows
  norms                   RMS norm with sum, gate or RoPE; attention's gate      any GPU
  topk                    top-k experts, their weights, pairs sorted by expert   any GPU
  cuda.skinny_gemm        a GEMM of few rows; gate, up, SwiGLU;                  CUDA, decode steps
                          experts, by pairs sorted by expert
  metal.skinny_gemm       the same for up to sixteen rows; experts               Metal, decode steps
  metal.window_attention  attention of windows, with the same bits in every pass Metal, exact mode
  metal.gated_delta_prompts  mlx's own gated delta rule in chunks                Metal, prompts
  cuda.decode_attention   attention of windows, split over the KV                CUDA, decode steps
  cuda.flash_attention    attention of a chunk, scores in registers              Hopper, prompts
  cuda.gated_delta_chunks the gated delta rule in chunks, on tensor cores        CUDA, prompts
  cuda.grouped_gemm       grouped GEMM of experts, 4 bit                         CUDA, prompts
  cuda.dequantize         dequantization before a dense GEMM                     CUDA, prompts

`attention`, `recurrence` and `skinny_gemm` choose among the forms of one operation; nothing outside
this package and `models.gemm` imports `cuda` or `metal`.

`gpu.few` says what is computed as a decode step: rows with windows of up to 17 tokens each, up to
64 tokens of a prompt, and up to 128 tokens outside `gpu.decode_pass`.

An `Operation` is compared with its reference before its first use with a shape and type (`works`);
if it fails, `portable` or mlx's operations in the same module run instead. `cases` lists all
operations, and `row_check` compares rows computed alone with the same rows among others.
The GEMMs are compared and timed when a model is loaded (`models.gemm.measure`).
"""
