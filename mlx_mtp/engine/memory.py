"""What serving a model takes in memory, how that is shared out, and which rows fit."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlx_mtp.cache.layout import STRIDE
from mlx_mtp.cache.specs import CacheMemory
from mlx_mtp.console import size_text
from mlx_mtp.errors import UsageError
from mlx_mtp.kernels.gpu import backend
from mlx_mtp.machine import MemoryLimit, text_bytes
from mlx_mtp.models.model import LoadedModel

_COPIES = 2  # of states, while rows join or leave
_WINDOWS = 3  # launched and not read, or run beside them or by the head's recursion
_LOGITS = 6  # logits, their processed form, noise, and what sorting them takes (float32)
PROMPT_POSITIONS = 32  # of a prompt whose logprobs are asked for: so many have logits at once
_PROMPT_LOGITS = 8  # measured: logits, their logarithms, and what finds the largest
_LONGER_STEPS = (2048, 1024)  # of prompts, that a GPU may compute faster than the default's
_LONGER_SHARE = 8  # such a step takes at most one part in so many of what is left for rows
_EXPANDED = 4  # weights of a layer's largest product, expanded on CUDA, at once
_MARGIN = 1.5  # measured: a chunk takes up to this much more than one layer of each kind

MOST_PREFIX_CACHE = 8 * 10**9  # bytes that the prefix cache takes by itself
_LEAST_TOKENS = 512  # a server with a shorter context is of no use; it is not started
_SHORT_ROW = 8000
_LONG_ROWS = (100_000, 32_000)  # of an agent


@dataclass(frozen=True)
class Footprint:
    """A model's demands, in bytes."""

    weights: int  # the head's not included
    head: int  # of the MTP head, its reduced lm_head included
    caches: CacheMemory
    depth: int  # most drafts a step
    vocab_size: int

    def row(self, tokens: int) -> int:
        """Most bytes of a row that holds so many tokens, prefill apart."""
        reach, window = tokens + _WINDOWS * (self.depth + 1), self.depth + 1
        kv = self.caches.most_kv(reach)
        # Rows that outgrow their class are copied layer by layer.
        copied = kv // len(self.caches.attention)
        states = _COPIES * self.caches.states_and_window(self.depth)
        scores = window * self.scores(reach + STRIDE)
        return kv + copied + states + scores + window * self.vocab_size * 4 * _LOGITS

    def chunk(self, step: int, tokens: int) -> int:
        """Most bytes that a chunk of up to `step` positions of a prompt takes beside the caches."""
        step = min(step, tokens)
        # One layer's attention scores and mask: not every head size has a fused kernel.
        scores = step * (self.scores(tokens) + tokens)
        # The numbers that a position has in a layer of each kind.
        layers = self.caches.layers
        numbers = sum(layer.activations() for layer in set(layers))
        numbers += max(layer.mlp.activations() for layer in layers)
        computed = step * numbers * max(self.caches.itemsize, 4)
        if backend() == "cuda":
            # A layer's widest product has half as many outputs as the layer has activations.
            widest = (max(each.activations() // 2, each.mlp.inner_size) for each in layers)
            weights = layers[0].mlp.hidden_size * max(widest) * self.caches.itemsize
            computed += _EXPANDED * weights
        # Logprobs of the prompt are computed when the layers are done.
        prompt = min(step, PROMPT_POSITIONS) * self.vocab_size * 4 * _PROMPT_LOGITS
        return max(scores + int(_MARGIN * computed), prompt) + self.vocab_size * 4 * _LOGITS

    def scores(self, tokens: int) -> int:
        """One layer's attention scores of one position to so many."""
        return self.caches.attention[0].heads * tokens * self.caches.itemsize


def footprint(model: LoadedModel, depth: int, num_draft_ids: int | None = None) -> Footprint:
    """A loaded model's; `num_draft_ids` is the size of a reduced draft vocabulary."""
    weights, head = model.nbytes()
    if model.head is not None and num_draft_ids is not None:
        head += num_draft_ids * model.row_nbytes()
    caches = CacheMemory(tuple(model.layer_specs), model.head is not None, model.dtype.size)
    return Footprint(weights, head, caches, depth, model.vocab_size)


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory is shared out, in bytes."""

    limit: MemoryLimit
    footprint: Footprint
    prefix_cache: int  # most that the prefix cache takes
    chunk: int  # most that a prefill chunk takes beside the caches
    prefill_step_size: int  # most tokens of such a chunk
    rows: int  # what is left for rows
    max_model_len: int  # most tokens of a request: the model's, the setting's, or what fits
    reduced: bool  # memory made that less than what the model allows

    def usage(self, lengths: Iterable[int]) -> float:
        """The share of the memory for rows that rows of so many tokens each take, at most."""
        return sum(map(self.footprint.row, lengths)) / self.rows

    def num_rows(self, tokens: int, most: int, beside: int = 0) -> int:
        """How many rows of so many tokens fit, beside one of that many."""
        left = self.rows - (self.footprint.row(beside) if beside else 0)
        return max(min(left // self.footprint.row(tokens), most - (beside > 0)), 0)

    def parts(self) -> dict[str, int]:
        parts = {"weights": self.footprint.weights, "head": self.footprint.head}
        parts |= {"prefix cache": self.prefix_cache, "prefill chunk": self.chunk}
        parts |= {"texts": text_bytes(self.limit.nbytes)}
        return parts | {"requests": self.rows}

    def shares(self) -> str:
        parts = self.parts().items()
        return ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts if nbytes)

    def rows_at_once(self, max_num_seqs: int) -> str:
        """Such as "16 of 8,000 tokens or 2 of 100,000 or 1 of 100,000 and 9 of 8,000"."""
        short = min(_SHORT_ROW, self.max_model_len)
        long = next((n for n in _LONG_ROWS if short < n <= self.max_model_len), self.max_model_len)
        if self.num_rows(long, max_num_seqs) == max_num_seqs:
            return f"{max_num_seqs} of {long:,} tokens"
        told = {n: f"{self.num_rows(n, max_num_seqs)} of {n:,}" for n in (short, long)}
        beside = self.num_rows(short, max_num_seqs, beside=long)
        if short < long and beside:
            told[0] = f"1 of {long:,} and {beside} of {short:,}"
        first, *others = told.values()
        return " or ".join([f"{first} tokens", *others])

    def lines(self, max_num_seqs: int) -> list[str]:
        less = ", less than the model allows: there is no memory for more" if self.reduced else ""
        context = f"context {self.max_model_len:,} tokens{less}"
        return [
            f"{size_text(self.limit.nbytes)} ({self.limit.source}): {self.shares()}",
            f"{context}; requests at once: {self.rows_at_once(max_num_seqs)}",
        ]


def plan_memory(
    footprint: Footprint,
    limit: MemoryLimit,
    *,
    allowed: int,  # most tokens that the model allows
    wanted: int | None,  # --max-model-len, if it was given; not above `allowed`
    prefill_step_size: int,
    longer_steps: bool = False,  # may be planned instead, on a GPU
    prefix_cache: int | None = 0,  # bytes; None: a quarter of what the weights leave, at most 8 GB
) -> MemoryPlan:
    """Share the memory out; UsageError, with the numbers and flags that would do, if it can't fit.

    Without `wanted` the context is cut to what one row has memory for.
    """
    fixed = footprint.weights + footprint.head
    left = limit.nbytes - text_bytes(limit.nbytes) - fixed
    own = prefix_cache is None
    if prefix_cache is None:
        prefix_cache = min(max(left, 0) // 4, MOST_PREFIX_CACHE)
    room = left - prefix_cache

    def need(tokens: int, step: int = prefill_step_size) -> int:
        return footprint.chunk(step, tokens) + footprint.row(tokens)

    tokens = wanted or allowed
    least = min(_LEAST_TOKENS, tokens)
    found = _largest(least, tokens, lambda n: need(n) <= room)
    if found is None or (wanted is not None and found < wanted):
        asked = tokens if found else least
        needed = need(asked)
        kept = min(needed // 3 + 1, MOST_PREFIX_CACHE) if own else prefix_cache
        total = fixed + needed + kept
        total += text_bytes(total + total // 31 + 1)
        more = f"--memory-limit {_as_flag(total)} if the machine has that"
        told = f"Of {size_text(limit.nbytes)} ({limit.source}) the weights take {size_text(fixed)}"
        if left <= 0:
            raise UsageError(
                f"Not enough memory. {told}. It would take {more}, or a model with fewer bits per "
                "weight, or a smaller one: `mlx-mtp models` lists what fits."
            )
        advice = [more]
        if prefix_cache:
            told += f" and the prefix cache {size_text(prefix_cache)}"
            if needed <= left:
                advice.append(f"--prefix-cache-size {(left - needed) // 10**6}MB or less")
        step = _largest(1, prefill_step_size, lambda n: need(asked, n) <= room)
        if step is not None:
            advice.append(f"--prefill-step-size {step} or less")
        if found:
            advice.append(f"--max-model-len {found} or less")
        raise UsageError(
            f"Not enough memory: one request of {asked:,} tokens needs {size_text(needed)}. "
            f"{told}. What would do: {', or '.join(advice)}."
        )
    chunk = footprint.chunk(prefill_step_size, found)
    most = min(chunk + (room - chunk) // _LONGER_SHARE, room - footprint.row(found))
    for step in _LONGER_STEPS if longer_steps and backend() else ():
        if (longer := footprint.chunk(step, found)) <= most:
            prefill_step_size, chunk = step, longer
            break
    return MemoryPlan(
        limit=limit,
        footprint=footprint,
        prefix_cache=prefix_cache,
        chunk=chunk,
        prefill_step_size=prefill_step_size,
        rows=room - chunk,
        max_model_len=found,
        reduced=found < tokens,
    )


def _as_flag(nbytes: int) -> str:
    """A size to give to a flag, not less than this."""
    return f"{-(-nbytes // 10**6)}MB" if nbytes < 10**10 else f"{-(-nbytes // 10**8) / 10:g}GB"


def _largest(low: int, high: int, good: Callable[[int], bool]) -> int | None:
    """The largest number from `low` to `high` that is good, if all below a good one are good."""
    if not good(low):
        return None
    return low - 1 + bisect_left(range(low, high + 1), True, key=lambda number: not good(number))
