"""mlx-lm's models running on this package's caches, and the MTP head.

Loading: `hub`, `download` and `files` find, fetch and read a model, `sizes` checks its config.json,
`loader` builds mlx-lm's model, `family`, `qwen3_next` and `qwen3_5` patch it, `head_weights` and
`tower_weights` load the MTP head and the vision tower, `tensor_parallel` splits weights over ranks,
and the engine gets a `model.LoadedModel`. `published` lists known models.

Running: `layers` and `moe` are the patched layers, `head` is the MTP head, `compiled` compiles each
kind of layer once, `joined` has faster forms for small models on a CPU, and `gemm` decides at load
time which operation computes each matrix product.
"""
