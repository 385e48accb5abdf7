"""Log-probabilities of sampled tokens and of prompts' own tokens, as requests asked for them."""

from collections.abc import Sequence as Many
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mtp.engine.memory import PROMPT_POSITIONS
from mlx_mtp.engine.request import TokenLogprobs
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.sampler import logprobs


def token_logprobs(tables: Many[np.ndarray], top: int | None) -> tuple[TokenLogprobs, ...]:
    """Returns a row's logprobs with `top` alternatives each, from tables of `sampler.logprobs`.

    () if `top` is None.
    """
    if top is None:
        return ()
    return tuple(
        TokenLogprobs(chosen, tuple(zip(ids[:top], values[:top])), *rank)
        for chosen, ids, values, *rank in zip(*(table.tolist() for table in tables))
    )


class PromptScores(NamedTuple):
    """Log-probabilities of a chunk's tokens, on the device: row after row, without padding."""

    counts: list[int]  # number of positions of each row
    tops: list[int | None]  # alternatives that each row asked for; None: no logprobs
    tables: tuple[mx.array, ...]  # see `sampler.logprobs`

    def read(self) -> list[tuple[TokenLogprobs, ...]]:
        ends = np.cumsum(self.counts)[:-1]
        rows = zip(*(np.split(np.array(table), ends) for table in self.tables))
        return [token_logprobs(row, top) for row, top in zip(rows, self.tops)]


def prompt_scores(
    model: LoadedModel,
    hidden: mx.array,  # [N, H], post-norm, of the tokens of a chunk of B rows
    following: mx.array,  # int32 [N], the token after each
    counts: Many[int],  # [B], number of each row's positions that have a next token in the prompt
    lengths: Many[int],  # [B], number of all positions of each row
    tops: list[int | None],  # [B], see `PromptScores.tops`
    vocab_size: int,
) -> PromptScores | None:
    """Launch the logprobs that a chunk's rows asked for; returns None if no row did.

    Takes a few positions at a time: the logits of all would take as much memory as a small model.
    """
    counts = [0 if top is None else count for top, count in zip(tops, counts)]
    if not any(counts):
        return None
    mask = np.concatenate([np.arange(n) < count for n, count in zip(lengths, counts)])
    places = mx.array(np.flatnonzero(mask))
    states, targets = hidden[places], following[places]
    most = max(top for top in tops if top is not None)
    parts: list[tuple[mx.array, ...]] = []
    for start in range(0, len(states), PROMPT_POSITIONS):
        span = slice(start, start + PROMPT_POSITIONS)
        some = states[span]
        if parts:  # Compute after the previous part, so that the logits of only one part exist.
            some = mx.depends(some, parts[-1])
        logits = model.logits(some)[:, :vocab_size]
        parts.append(logprobs(logits, targets[span], most))
    return PromptScores(counts, tops, tuple(mx.concatenate(list(pieces)) for pieces in zip(*parts)))
