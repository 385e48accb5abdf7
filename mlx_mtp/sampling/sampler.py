"""Drawing tokens for all rows and positions of a window at once.

The token at absolute position p is a function of the logits at p, the request's parameters, its
seed and p. It can't tell whether it is drawn in a verify window, alone, or in a batch, and so
speculation needs no residual distribution: a draft is accepted when it is the token drawn.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_mtp.sampling.largest import largest_ids
from mlx_mtp.sampling.noise import keyed_gumbel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.processors import apply_penalties, mask_out
from mlx_mtp.sampling.truncation import Truncation


class Drawing(Protocol):
    """Draws tokens: a `Sampler`, or one that looks to masks by itself (`sampling/guide.py`)."""

    def draw(
        self,
        logits: mx.array,
        positions: mx.array,
        window: mx.array,
        *,
        ids: mx.array | None = None,
    ) -> mx.array:
        """See `Sampler`."""


class Sampler:
    """The sampling parameters of B rows as arrays, and the token counts that penalties need.

    Args:
        params: one per row.
        prompts: the rows' prompt token ids, for the repetition penalty.
        vocab_size: V, the tokenizer's; ids at or above it are never drawn.
    """

    def __init__(
        self, params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]], vocab_size: int
    ) -> None:
        self.vocab_size = vocab_size
        self._set_params(params)
        self.output_counts: mx.array | None = None
        self.in_prompt: mx.array | None = None
        if self.any_penalties:
            self.output_counts = mx.zeros((len(params), vocab_size), dtype=mx.int32)
            self.in_prompt = mx.array(_mark(prompts, vocab_size))

    def _set_params(self, params: Sequence[SamplingParams]) -> None:
        self.params = list(params)
        self.any_sampled = any(not p.greedy for p in params)
        self.any_penalties = any(p.has_penalties for p in params)
        reported = [p.top_logprobs for p in params if p.top_logprobs is not None]
        self.num_logprobs = max(reported, default=None)
        self.greedy = mx.array([p.greedy for p in params])[:, None, None]
        self.seeds = mx.array([p.noise_seed() for p in params], dtype=mx.uint32)
        self.temperature = _column([1.0 if p.greedy else p.temperature for p in params])
        self.truncation = Truncation(params, self.vocab_size)
        self.repetition = _column([p.repetition_penalty for p in params])
        self.presence = _column([p.presence_penalty for p in params])
        self.frequency = _column([p.frequency_penalty for p in params])
        self.bias = _dense_bias(params, self.vocab_size)

    def draw(
        self,
        logits: mx.array,
        positions: mx.array,
        window: mx.array,
        *,
        mask: mx.array | None = None,
        ids: mx.array | None = None,
    ) -> mx.array:
        """Draw the token that follows each of the last T positions of a window.

        Args:
            logits: [B, T, V or more], any float type.
            positions: int32 [B, T], absolute position of the token to draw.
            window: int32 [B, W], W >= T, the tokens that come before; of these the first is in
                the counts already, the others are drafts and are added for penalties.
            mask: uint8 [B, T, bytes], a bit for each of the V tokens that may be drawn; None: all
                may.
            ids: int32 [N], ascending, all below V: the tokens that the logits, then [B, T, N],
                are of, and to draw from. The draw is that from all V tokens, had the others
                logits of minus infinity.

        Returns:
            int32 [B, T].
        """
        scores = self.scores(logits, positions, window, mask=mask, ids=ids)
        best = mx.argmax(scores, axis=-1).astype(mx.int32)
        return best if ids is None else ids[best]

    def scores(
        self,
        logits: mx.array,
        positions: mx.array,
        window: mx.array,
        *,
        mask: mx.array | None = None,
        ids: mx.array | None = None,
    ) -> mx.array:
        """What `draw` takes the largest of: processed logits and noise, float32 [B, T, V or N]."""
        scores = logits[..., : self.vocab_size].astype(mx.float32)
        if self.output_counts is not None and self.in_prompt is not None:
            tokens = mx.arange(self.vocab_size) if ids is None else ids
            drafted = _draft_counts(window, tokens)[:, -logits.shape[1] :]
            counts = _at(self.output_counts, ids)[:, None] + drafted
            seen = _at(self.in_prompt, ids)[:, None] | (counts > 0)
            scores = apply_penalties(
                scores, counts, seen, self.repetition, self.presence, self.frequency
            )
        if self.bias is not None:
            scores = scores + _at(self.bias, ids)
        if mask is not None:
            # Before the cuts: they choose among the tokens that are allowed.
            scores = mask_out(scores, mask, ids)
        if not self.any_sampled:
            return scores
        noisy = scores / self.temperature
        if self.truncation:
            noisy = self.truncation.apply(noisy)
        noisy = noisy + keyed_gumbel(self.seeds, positions, self.vocab_size, ids)
        return mx.where(self.greedy, scores, noisy)

    def count(self, tokens: mx.array, num_kept: mx.array) -> None:
        """Add the first `num_kept[b]` of the tokens [B, T] that were drawn to the counts."""
        if self.output_counts is None:
            return
        kept = mx.arange(tokens.shape[1]) < num_kept[:, None]
        rows = mx.arange(tokens.shape[0])[:, None]
        self.output_counts = self.output_counts.at[rows, tokens].add(kept.astype(mx.int32))

    def logprobs(
        self, logits: mx.array, tokens: mx.array
    ) -> tuple[mx.array, mx.array, mx.array] | None:
        """Log-probabilities of the model's own distribution, if any row asked for them.

        Args:
            logits: [B, T, V or more], unprocessed.
            tokens: int32 [B, T], those drawn.

        Returns:
            logprob of each token float32 [B, T], ids int32 [B, T, N] and logprobs float32
            [B, T, N] of the N most probable tokens, best first, equal ones by id.
        """
        if self.num_logprobs is None:
            return None
        scores = logits[..., : self.vocab_size].astype(mx.float32)
        scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
        top = min(self.num_logprobs, self.vocab_size)
        ids = largest_ids(scores, top)
        return chosen, ids, mx.take_along_axis(scores, ids, axis=-1)

    def take(self, rows: Sequence[int]) -> Sampler:
        """A sampler of these rows alone, in the order given."""
        taken = copy.copy(self)
        taken._set_params([self.params[i] for i in rows])
        taken.output_counts = taken.in_prompt = None
        if taken.any_penalties:
            counts, in_prompt = self._tables()
            where = mx.array(list(rows), dtype=mx.int32)
            taken.output_counts, taken.in_prompt = counts[where], in_prompt[where]
        return taken

    def extend(self, other: Sampler) -> None:
        """Append the other's rows."""
        if self.any_penalties or other.any_penalties:
            counts, prompts = zip(self._tables(), other._tables(), strict=True)
            self.output_counts = mx.concatenate(list(counts))
            self.in_prompt = mx.concatenate(list(prompts))
        self._set_params([*self.params, *other.params])

    def _tables(self) -> tuple[mx.array, mx.array]:
        """Counts and prompt marks; all zero for rows that never needed them, and never will."""
        if self.output_counts is not None and self.in_prompt is not None:
            return self.output_counts, self.in_prompt
        shape = (len(self.params), self.vocab_size)
        return mx.zeros(shape, dtype=mx.int32), mx.zeros(shape, dtype=mx.bool_)

    def arrays(self) -> list[mx.array]:
        """What must be evaluated with a step."""
        return [a for a in (self.output_counts, self.in_prompt) if a is not None]


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values))[:, None, None]


def _mark(prompts: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    marked = np.zeros((len(prompts), vocab_size), dtype=bool)
    for row, prompt in enumerate(prompts):
        marked[row, np.asarray(prompt, dtype=np.int64)] = True
    return marked


def _dense_bias(params: Sequence[SamplingParams], vocab_size: int) -> mx.array | None:
    if not any(p.logit_bias for p in params):
        return None
    bias = np.zeros((len(params), 1, vocab_size), dtype=np.float32)
    for row, p in enumerate(params):
        for token, value in p.logit_bias:
            bias[row, 0, token] += value
    return mx.array(bias)


def _at(table: mx.array, ids: mx.array | None) -> mx.array:
    """The columns of these tokens, of a table with one for each."""
    return table if ids is None else table[..., ids]


def _draft_counts(window: mx.array, tokens: mx.array) -> mx.array:
    """Occurrences of N tokens among the drafts before each position: int32 [B, T, N]."""
    batch, length = window.shape
    one_hot = window[:, 1:, None] == tokens
    first = mx.zeros((batch, 1, tokens.size), dtype=mx.int32)
    if length == 1:
        return first
    return mx.concatenate([first, mx.cumsum(one_hot.astype(mx.int32), axis=1)], axis=1)
