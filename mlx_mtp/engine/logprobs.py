"""Log-probabilities of prompts' own tokens, from the hidden states of a prefill chunk."""

from collections.abc import Sequence as Many

import mlx.core as mx
import numpy as np

from mlx_mtp.engine.memory import PROMPT_POSITIONS
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import ChunkArrays, PromptScores
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.sampler import logprobs


def prompt_scores(
    model: LoadedModel,
    hidden: mx.array,  # [N, H], post-norm
    arrays: ChunkArrays,
    sequences: Many[Sequence],
    vocab_size: int,
) -> PromptScores | None:
    """Launch what a chunk's rows asked for; None if there is nothing.

    A few positions at a time: the logits of all would take as much memory as a small model.
    """
    asked = [s.request.sampling.prompt_logprobs for s in sequences]
    # What follows a prompt's last token is not of the prompt. (No row begins with a prefix.)
    rows = zip(asked, arrays.num_computed.tolist(), arrays.is_last.tolist())
    counts = [0 if top is None else length - is_last for top, length, is_last in rows]
    if not any(counts):
        return None
    spans = zip(arrays.lengths.tolist(), counts)
    wanted = np.concatenate([np.arange(length) < count for length, count in spans])
    places = mx.array(np.flatnonzero(wanted))
    states, following = hidden[places], arrays.following[places]
    most = max(top for top in asked if top is not None)
    parts: list[tuple[mx.array, ...]] = []
    for start in range(0, len(states), PROMPT_POSITIONS):
        span = slice(start, start + PROMPT_POSITIONS)
        some = states[span]
        if parts:  # Not before the others are done, or their logits would be there at once.
            some = mx.depends(some, parts[-1])
        logits = model.logits(some)[:, :vocab_size]
        parts.append(logprobs(logits, following[span], most))
    return PromptScores(counts, tuple(mx.concatenate(list(pieces)) for pieces in zip(*parts)))
