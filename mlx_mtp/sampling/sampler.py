"""Samples tokens for all rows and positions of a window together.

The token at absolute position p is a function of the logits at p, the request's parameters, its
seed and p, so a draft is accepted if it equals the sampled token (`verify` has one exception).
Logits are processed in this order: penalties, bias and allowed ids, mask, min_tokens, temperature,
top_k, top_p, min_p, noise. Each step leaves a row with neutral parameters exactly as it was, so a
row's tokens don't depend on its neighbours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np

from mlx_mtp.distributed import broadcast
from mlx_mtp.kernels.gpu import fused
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.truncation import Truncation, column, largest_ids


class Sampler:
    """The sampling parameters of B rows as arrays, and the token counts for penalties.

    Ids at or above `vocab_size` (V) and ids in `never` are never sampled. `stop_ids` are, for each
    row, all ids that end it.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        stop_ids: Sequence[Sequence[int]] | None = None,
        never: Sequence[int] = (),
    ) -> None:
        self.vocab_size, self._never = vocab_size, tuple(never)
        stop_ids = [p.stop_token_ids for p in params] if stop_ids is None else stop_ids
        firsts = (len(prompt) + p.min_tokens for prompt, p in zip(prompts, params, strict=True))
        self._set_params(params, list(zip(firsts, stop_ids, strict=True)))
        # With penalties, two int32 [B, V]: how often each token occurs in the output; and 1 + its
        # last position in the prompt or, if any row has a context size, in prompt and output
        # (0: none).
        self.counts: tuple[mx.array, mx.array] | None = None
        if self.any_penalties:
            latest = np.zeros((len(params), vocab_size), dtype=np.int32)
            for row, prompt in enumerate(prompts):
                latest[row, np.asarray(prompt, dtype=np.int64)] = np.arange(1, len(prompt) + 1)
            self.counts = mx.zeros(latest.shape, dtype=mx.int32), mx.array(latest)

    def _set_params(
        self, params: Sequence[SamplingParams], ends: Sequence[tuple[int, Sequence[int]]]
    ) -> None:
        self.params = list(params)
        self._ends = list(ends)  # each row's first position that allows a stop id; its stop ids
        self.any_sampled = any(not p.greedy for p in params)
        reported = [p.top_logprobs for p in params if p.top_logprobs is not None]
        self.num_logprobs = max(reported, default=None)
        self.greedy = mx.array([p.greedy for p in params])[:, None, None]
        self.seeds = mx.array([p.noise_seed() for p in params], dtype=mx.uint32)
        self.temperature = column([1.0 if p.greedy else p.temperature for p in params])
        self.truncation = Truncation(params, self.vocab_size)
        self.repetition = column([p.repetition_penalty for p in params])
        self.presence = column([p.presence_penalty for p in params])
        self.frequency = column([p.frequency_penalty for p in params])
        neutral = 1.0, 0.0, 0.0
        self.any_penalties = any(
            (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != neutral
            for p in params
        )
        # How many of the last tokens the repetition penalty looks at; 0: all.
        contexts = [p.repetition_context_size * (p.repetition_penalty != 1.0) for p in params]
        self.context = mx.array(contexts)[:, None, None] if any(contexts) else None
        # float32 [B, 1]: a draft may replace the sampled token if its score is at most this much
        # lower; minus infinity: no draft may.
        self.margin: mx.array | None = None
        if any(p.optimistic for p in params):
            shares = [p.optimistic for p in params]
            self.margin = mx.array([-math.log(x) if x else -math.inf for x in shares])[:, None]
        self.stops: mx.array | None = None  # bool [B, 1, V], True: forbidden before `first_end`
        if any(p.min_tokens for p in params):
            stops = np.zeros((len(params), 1, self.vocab_size), dtype=bool)
            for row, (_, ids) in enumerate(ends):
                stops[row, 0, list(ids)] = params[row].min_tokens > 0
            self.stops = mx.array(stops)
            self.first_end = mx.array([first for first, _ in ends])[:, None, None]
        self.bias: mx.array | None = None
        if any(p.logit_bias or p.allowed_token_ids for p in params):
            bias = np.zeros((len(params), 1, self.vocab_size), dtype=np.float32)
            for row, p in enumerate(params):
                if p.allowed_token_ids:
                    bias[row] = -np.inf
                    bias[row, 0, list(p.allowed_token_ids)] = 0
                for token, value in p.logit_bias:
                    bias[row, 0, token] += value
            self.bias = mx.array(bias)

    def draw(
        self,
        logits: mx.array,  # [B, T, V or more], any float type; with `ids` [B, T, N]
        positions: mx.array,  # int32 [B, T], absolute positions of the tokens
        window: mx.array,  # int32 [B, W], W >= T: the last emitted token, then drafts
        ids: mx.array | None = None,  # int32 [N], ascending, below V, without never sampled ids
        mask: mx.array | None = None,  # uint8 [B, T, bytes], a bit per token; None: all allowed
    ) -> mx.array:
        """Sample the token after each of the last T positions of a window; returns int32 [B, T].

        With `ids` the result is as if all other tokens had a logit of minus infinity.
        """
        if self._plain and mask is None:
            scores = self._possible(logits, ids)  # no float32 copy, as the argmax is the same
        else:
            scores = self.scores(logits, positions, window, ids, mask)
        best = mx.argmax(scores, axis=-1).view(mx.int32)
        return broadcast(best if ids is None else ids[best])

    def verify(
        self,
        logits: mx.array,  # [B, T, V or more]
        positions: mx.array,  # int32 [B, T]
        window: mx.array,  # int32 [B, T]
        mask: mx.array | None,
        num_drafts: mx.array | None,  # int32 [B], each row's number of drafts; None: T-1
    ) -> tuple[mx.array, mx.array | None]:
        """Like `draw`, but drafts replace sampled tokens as `SamplingParams.optimistic` allows.

        Returns the tokens, int32 [B, T], and where a draft replaced one, bool [B, T-1]; None:
        nowhere.
        """
        if self.margin is None or window.shape[1] == 1:
            return self.draw(logits, positions, window, mask=mask), None
        scores = self._processed(logits, positions, window, None, mask)
        drawn = mx.argmax(self._noisy(scores, positions, None), axis=-1).astype(mx.int32)
        before, drafts = drawn[:, :-1], window[:, 1:]
        both = mx.take_along_axis(scores[:, :-1], mx.stack([before, drafts], axis=-1), axis=-1)
        taken = (both[..., 1] >= both[..., 0] - self.margin) & (drafts != before)
        taken = taken & (both[..., 1] > -mx.inf)  # no forbidden draft, even if all are forbidden
        if num_drafts is not None:
            taken = taken & (mx.arange(taken.shape[1]) < num_drafts[:, None])
        tokens = mx.concatenate([mx.where(taken, drafts, before), drawn[:, -1:]], axis=1)
        return broadcast(tokens), taken

    def scores(
        self,
        logits: mx.array,
        positions: mx.array,
        window: mx.array,
        ids: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> mx.array:
        """Returns processed logits plus noise, which `draw` maximizes: float32 [B, T, V or N]."""
        return self._noisy(self._processed(logits, positions, window, ids, mask), positions, ids)

    def _processed(
        self,
        logits: mx.array,
        positions: mx.array,
        window: mx.array,
        ids: mx.array | None,
        mask: mx.array | None,
    ) -> mx.array:
        """Processed logits, without noise: float32 [B, T, V or N]."""
        scores = self._possible(logits, ids).astype(mx.float32)
        if self.counts is not None:
            scores = self._penalize(scores, positions, window, ids)
        if self.bias is not None:
            scores = scores + _at(self.bias, ids)
        if mask is not None:
            # Before top_k, top_p and min_p, which choose among allowed tokens.
            scores = mask_out(scores, mask, ids)
        if self.stops is not None:
            early = _at(self.stops, ids) & (positions[..., None] < self.first_end)
            longer = mx.where(early, -mx.inf, scores)
            possible = mx.max(longer, axis=-1, keepdims=True) > -mx.inf
            scores = mx.where(possible, longer, scores)
        if not self.any_sampled:
            return scores
        scores = scores / self.temperature  # 1 in greedy rows, which are not truncated either
        return self.truncation.apply(scores) if self.truncation else scores

    def _possible(self, logits: mx.array, ids: mx.array | None) -> mx.array:
        """The logits of the tokens below V (or `ids`); minus infinity for `never` ids."""
        scores = logits[..., : self.vocab_size]
        if not self._never or ids is not None:
            return scores
        never = mx.broadcast_to(mx.array(self._never), (*scores.shape[:-1], len(self._never)))
        return mx.put_along_axis(scores, never, mx.array(-mx.inf, scores.dtype), axis=-1)

    def _noisy(self, scores: mx.array, positions: mx.array, ids: mx.array | None) -> mx.array:
        if not self.any_sampled:
            return scores
        return _add_noise(scores, self.greedy, self.seeds, positions, self.vocab_size, ids)

    def _penalize(
        self, logits: mx.array, positions: mx.array, window: mx.array, ids: mx.array | None
    ) -> mx.array:
        tokens = mx.arange(self.vocab_size) if ids is None else ids
        drafted = mx.cumsum((window[:, 1:, None] == tokens).astype(mx.int32), axis=1)
        drafted = mx.pad(drafted, [(0, 0), (1, 0), (0, 0)])[:, -logits.shape[1] :]
        output, latest = (_at(table, ids) for table in self._counts())
        counts = output[:, None] + drafted
        seen = (latest[:, None] > 0) | (counts > 0)
        if self.context is not None:
            # `latest` has 1 + positions: for a draft, the position after it.
            behind = positions[:, -1:] + mx.arange(2 - window.shape[1], 1)
            latests = _latest(latest, window[:, 1:], behind, tokens)[-logits.shape[1] :]
            first = mx.maximum(positions[..., None] - self.context, 0)
            seen = mx.where(self.context > 0, mx.stack(latests, axis=1) > first, seen)
        repeated = mx.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits = mx.where(seen, repeated, logits)
        return logits - self.presence * (counts > 0) - self.frequency * counts

    def count_sampled(self, tokens: mx.array, num_kept: mx.array, positions: mx.array) -> None:
        """Add the first `num_kept[b]` of the sampled tokens [B, T] to the counts."""
        if self.counts is None:
            return
        output, latest = self.counts
        is_kept = mx.arange(tokens.shape[1]) < num_kept[:, None]
        rows = mx.arange(tokens.shape[0])[:, None]
        if self.context is not None:
            counted, every = mx.where(is_kept, tokens, -1), mx.arange(self.vocab_size)
            latest = _latest(latest, counted, positions + 1, every)[-1]
        self.counts = output.at[rows, tokens].add(is_kept.astype(mx.int32)), latest

    def logprobs(
        self, logits: mx.array, tokens: mx.array
    ) -> tuple[mx.array, mx.array, mx.array] | None:
        """Returns log-probabilities of the unprocessed distribution; None if no row asked for any.

        They are those of `tokens`, float32 [B, T], and ids and values of the N most probable
        tokens, [B, T, N].
        """
        if self.num_logprobs is None:
            return None
        return logprobs(logits[..., : self.vocab_size], tokens, self.num_logprobs)[:3]

    def select(self, rows: Sequence[int]) -> Sampler:
        selected = copy.copy(self)
        selected._set_params([self.params[i] for i in rows], [self._ends[i] for i in rows])
        selected.counts = None
        if selected.any_penalties:
            output, latest = self._counts()
            where = mx.array(list(rows), dtype=mx.int32)
            selected.counts = output[where], latest[where]
        return selected

    def extend(self, other: Sampler) -> None:
        if self.counts is not None or other.counts is not None:
            pairs = zip(self._counts(), other._counts())
            output, latest = (mx.concatenate([ours, theirs]) for ours, theirs in pairs)
            self.counts = output, latest
        self._set_params([*self.params, *other.params], [*self._ends, *other._ends])

    @property
    def _plain(self) -> bool:
        """True if no row's logits are processed and no row gets noise."""
        changing = self.counts, self.bias, self.stops
        return not self.any_sampled and all(each is None for each in changing)

    def _counts(self) -> tuple[mx.array, mx.array]:
        """The counts, or zeros if no row has penalties."""
        shape = (len(self.params), self.vocab_size)
        return self.counts or (mx.zeros(shape, dtype=mx.int32), mx.zeros(shape, dtype=mx.int32))

    def arrays(self) -> list[mx.array]:
        return list(self.counts or ())


def logprobs(
    logits: mx.array, tokens: mx.array, count: int
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Returns log-probabilities by unprocessed logits [..., V]; `tokens` are int32 [...].

    They are those of `tokens`, float32 [...]; ids and values of the N = `count` most probable
    tokens, [..., N]; and the ranks of `tokens`, int32 [...], 1 for the most probable.
    """
    scores = logits.astype(mx.float32)
    scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(scores, tokens[..., None], axis=-1)
    ids = largest_ids(scores, count)
    ranks = mx.sum(scores > chosen, axis=-1).astype(mx.int32) + 1
    return chosen[..., 0], ids, mx.take_along_axis(scores, ids, axis=-1), ranks


@fused
def _add_noise(
    scores: mx.array,  # [B, T, V or N]
    greedy: mx.array,  # bool [B, 1, 1], rows without noise
    seeds: mx.array,
    positions: mx.array,
    vocab_size: int,
    ids: mx.array | None,
) -> mx.array:
    return mx.where(greedy, scores, scores + keyed_gumbel(seeds, positions, vocab_size, ids))


def keyed_gumbel(
    seeds: mx.array, positions: mx.array, vocab_size: int, ids: mx.array | None = None
) -> mx.array:
    """Returns Gumbel noise, float32 [B, T, V or N], for seeds uint32 [B], positions int32 [B, T].

    `argmax(logits + noise)` samples from softmax(logits) (the Gumbel-max trick). As the noise
    depends only on seed and position, it samples the same token however often a position is
    computed.
    """
    batch, length = positions.shape
    seeds = mx.broadcast_to(seeds[:, None], (batch, length))
    keys = mx.stack([seeds, positions.astype(mx.uint32)], axis=-1).reshape(-1, 2)
    draw = mx.vmap(lambda key: mx.random.uniform(shape=(vocab_size,), key=key))
    uniform = draw(keys).reshape(batch, length, vocab_size)
    # The two logarithms take longer than the random bits, so they are computed only for `ids`.
    return -mx.log(-mx.log(_at(uniform, ids)))


def mask_out(logits: mx.array, mask: mx.array, ids: mx.array | None = None) -> mx.array:
    """Set logits of the tokens that `mask`, uint8 [B, T, bytes], forbids to minus infinity."""
    bits = (mask[..., None] >> mx.arange(8, dtype=mx.uint8)) & 1
    bits = _at(bits.reshape(*mask.shape[:-1], -1), ids)
    assert bits.shape[-1] >= logits.shape[-1], "the mask is of another vocabulary"
    return mx.where(bits[..., : logits.shape[-1]].astype(mx.bool_), logits, -mx.inf)


def _latest(
    latest: mx.array, tokens: mx.array, places: mx.array, vocabulary: mx.array
) -> list[mx.array]:
    """`latest`, int32 [B, V], before the first of `tokens` and after each of them."""

    def after(before: mx.array, i: int) -> mx.array:
        return mx.where(tokens[:, i, None] == vocabulary, places[:, i, None], before)

    return list(accumulate(range(tokens.shape[1]), after, initial=latest))


def _at(table: mx.array, ids: mx.array | None) -> mx.array:
    return table if ids is None else table[..., ids]
