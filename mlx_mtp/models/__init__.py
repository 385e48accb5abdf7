"""mlx-lm's models on our caches, and the MTP head.

Loading: `hub` and `files` find and read, `sizes` checks, `loader` builds mlx-lm's model, `family`
and the two files of families patch it, `head_weights` and `head` are the head's, `shards` cuts for
several ranks, `loaded` is what the engine gets. `published` lists models.

Running: `layers` and `mixture` are the patched layers, `shared` compiles them once for all of a
kind. Which kernel a product runs is decided at load: `few_rows` for decode steps and `many_rows`
for prompts, by agreement and speed; `fixed_rows` for `--exact`. The decision is a module's class,
and its `least_rows`.
"""
