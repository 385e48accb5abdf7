"""mlx-lm's models on our caches, and the MTP head.

Loading: `hub` and `files` find and read a model, `sizes` checks its config.json, `loader` builds
mlx-lm's model, `family` and the two files of families patch it, `head_weights` and `head` are the
MTP head's, `tensor_parallel` splits weights over ranks, and the engine gets `model.LoadedModel`.
`published` lists models.

Running: `layers` and `moe` are the patched layers, `compiled` compiles them once for all of a kind,
and `gemm` decides at load which operation computes each product.
"""
