"""The cost of verifying: milliseconds of a decode step of one row, by its window's tokens."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_mtp.models.model import LoadedModel
from mlx_mtp.selftest.timing import microseconds

TOKENS = (1, 2, 4, 8, 16)
_CONTEXT = 512  # tokens before the window


def window_milliseconds(model: LoadedModel, tokens: Sequence[int] = TOKENS) -> list[float]:
    """Returns the time of a step of target model and lm_head for each number of window tokens."""
    context = min(_CONTEXT, model.max_model_len // 2)
    return [microseconds(lambda n=n: [_step(model, n, context)]) / 1e3 for n in tokens]  # type: ignore[misc]


def _step(model: LoadedModel, tokens: int, context: int) -> mx.array:
    """The logits of a window after a context of zeros, so nothing is computed before it."""
    cache = model.make_cache(1)
    cache.reserve([context + tokens])
    cache.offset = mx.array([context], dtype=mx.int32)
    cache.begin_window([tokens])
    ids = (mx.arange(tokens) * 7919) % model.vocab_size
    return model.logits(model.hidden(ids, cache))
