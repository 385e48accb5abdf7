"""The memory that serving a model takes, how it is shared out, and which rows fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_mtp.cache.layout import STRIDE
from mlx_mtp.cache.specs import CacheMemory
from mlx_mtp.config import EngineConfig
from mlx_mtp.console import size_text
from mlx_mtp.errors import UsageError
from mlx_mtp.kernels.gpu import backend
from mlx_mtp.machine import MemoryLimit, client_text_bytes
from mlx_mtp.vision.placed import MOST_ROWS

if TYPE_CHECKING:
    from mlx_mtp.models.model import LoadedModel

_COPIES = 2  # of states while rows join or leave
_WINDOWS = 3  # a row's positions behind its tokens: windows in flight, and the head's drafts
_LOGITS = 6  # float32 arrays: logits, processed logits, noise, and sorting
PROMPT_POSITIONS = 32  # have logits at once when logprobs of a prompt are computed
_PROMPT_LOGITS = 8  # float32 arrays, measured: logits, logarithms, and the search for the largest
_LONGER_STEPS = (2048, 1024)  # tokens; a GPU may compute such chunks faster than the default's
_LONGER_SHARE = 8  # such a chunk takes at most 1/8 more of the memory left for rows
_EXPANDED = 4  # dequantized weights of a layer's largest product at once, on CUDA
_MARGIN = 1.5  # measured: a chunk takes up to 1.5 times one layer of each kind

MOST_PREFIX_CACHE = 8 * 10**9  # bytes of the prefix cache by default
_LEAST_TOKENS = 512  # a server with a shorter context is not started
_SHORT_ROW = 8000
_LONG_ROWS = (100_000, 32_000)  # of an agent


@dataclass(frozen=True)
class Footprint:
    """What a model takes, in bytes."""

    weights: int  # without the MTP head's
    head: int  # the MTP head, with its reduced lm_head
    caches: CacheMemory
    depth: int  # most drafts per row and step
    vocab_size: int
    vision: int = 0  # the tower, what an image of the most tokens takes in it, and rows of images

    def row_bytes(self, tokens: int) -> int:
        """Most bytes of a row of so many tokens, without its prefill."""
        reach, window = tokens + _WINDOWS * (self.depth + 1), self.depth + 1
        kv = self.caches.most_kv(reach)
        # A row that outgrows its size class is copied layer by layer.
        copied = kv // len(self.caches.attention)
        states = _COPIES * self.caches.states_and_window(self.depth)
        scores = window * self.score_bytes(reach + STRIDE)
        return kv + copied + states + scores + window * self.vocab_size * 4 * _LOGITS

    def chunk_bytes(self, step: int, tokens: int) -> int:
        """Most bytes, beside the caches, of a prefill chunk of at most `step` tokens."""
        step = min(step, tokens)
        # One layer's attention scores and mask: not every head size has a fused kernel.
        scores = step * (self.score_bytes(tokens) + tokens)
        # Activations of a position in one layer of each kind.
        layers = self.caches.layers
        numbers = sum(layer.activations() for layer in set(layers))
        numbers += max(layer.mlp.activations() for layer in layers)
        computed = step * numbers * max(self.caches.itemsize, 4)
        if backend() == "cuda":
            # A layer's widest product has half as many outputs as the layer has activations.
            widest = (max(each.activations() // 2, each.mlp.inner_size) for each in layers)
            weights = layers[0].mlp.hidden_size * max(widest) * self.caches.itemsize
            computed += _EXPANDED * weights
        # Logprobs of the prompt are computed after the layers.
        prompt = min(step, PROMPT_POSITIONS) * self.vocab_size * 4 * _PROMPT_LOGITS
        return max(scores + int(_MARGIN * computed), prompt) + self.vocab_size * 4 * _LOGITS

    def score_bytes(self, tokens: int) -> int:
        """Bytes of one layer's attention scores of one position to so many."""
        return self.caches.attention[0].heads * tokens * self.caches.itemsize


def footprint(
    model: LoadedModel, depth: int, num_draft_ids: int | None = None, image_tokens: int = 0
) -> Footprint:
    """The footprint of a loaded model.

    `num_draft_ids`: size of a reduced draft vocabulary; `image_tokens`: most tokens of an image.
    """
    weights, head = model.nbytes()
    if model.head is not None and num_draft_ids is not None:
        head += num_draft_ids * model.row_nbytes()
    caches = CacheMemory(tuple(model.layer_specs), model.head is not None, model.dtype.size)
    vision = 0
    if model.tower is not None:
        scratch = model.tower.shape.scratch(image_tokens, model.dtype.size)
        vision = model.tower_nbytes + scratch + MOST_ROWS
    return Footprint(weights, head, caches, depth, model.vocab_size, vision)


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory is shared out, in bytes."""

    limit: MemoryLimit
    footprint: Footprint
    prefix_cache: int  # limit of the prefix cache
    chunk: int  # a prefill chunk, beside the caches
    prefill_step_size: int  # tokens of that chunk
    rows: int  # left for rows
    max_model_len: int  # tokens of a request: the model's limit, the setting, or what fits
    reduced: bool  # by memory, to less than the model allows

    def usage(self, lengths: Iterable[int]) -> float:
        """The share of the memory for rows that rows of these lengths take at most."""
        return sum(map(self.footprint.row_bytes, lengths)) / self.rows

    def num_rows(self, tokens: int, most: int, beside: int = 0) -> int:
        """How many rows of `tokens` fit, at most `most`, beside one row of `beside` tokens."""
        left = self.rows - (self.footprint.row_bytes(beside) if beside else 0)
        return max(min(left // self.footprint.row_bytes(tokens), most - (beside > 0)), 0)

    def bytes_by_use(self) -> dict[str, int]:
        """Planned bytes by what takes them."""
        parts = {"weights": self.footprint.weights, "head": self.footprint.head}
        parts |= {"vision": self.footprint.vision} if self.footprint.vision else {}
        parts |= {"prefix cache": self.prefix_cache, "prefill chunk": self.chunk}
        parts |= {"texts": client_text_bytes(self.limit.nbytes)}
        return parts | {"requests": self.rows}

    def shares(self) -> str:
        parts = self.bytes_by_use().items()
        return ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts if nbytes)

    def rows_at_once(self, max_num_seqs: int) -> str:
        """Such as "16 of 8,000 tokens or 2 of 100,000 or 1 of 100,000 and 9 of 8,000"."""
        short = min(_SHORT_ROW, self.max_model_len)
        long = next((n for n in _LONG_ROWS if short < n <= self.max_model_len), self.max_model_len)
        if self.num_rows(long, max_num_seqs) == max_num_seqs:
            return f"{max_num_seqs} of {long:,} tokens"
        texts = {n: f"{self.num_rows(n, max_num_seqs)} of {n:,}" for n in (short, long)}
        beside = self.num_rows(short, max_num_seqs, beside=long)
        if short < long and beside:
            texts[0] = f"1 of {long:,} and {beside} of {short:,}"
        first, *others = texts.values()
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
    max_model_len: int | None,  # --max-model-len, at most `allowed`; None: what fits
    prefill_step_size: int,
    longer_steps: bool = False,  # on a GPU, longer chunks if they fit
    prefix_cache: int | None = 0,  # bytes; None: a quarter of what the weights leave, at most 8 GB
) -> MemoryPlan:
    """Share out the memory; UsageError, with flags that would do, if a request can't fit."""
    fixed = footprint.weights + footprint.head + footprint.vision
    left = limit.nbytes - client_text_bytes(limit.nbytes) - fixed
    is_default = prefix_cache is None
    if prefix_cache is None:
        prefix_cache = min(max(left, 0) // 4, MOST_PREFIX_CACHE)
    room = left - prefix_cache

    def need(tokens: int, step: int = prefill_step_size) -> int:
        return footprint.chunk_bytes(step, tokens) + footprint.row_bytes(tokens)

    tokens = max_model_len or allowed
    least = min(_LEAST_TOKENS, tokens)
    fitting = _largest_good(least, tokens, lambda n: need(n) <= room)
    if fitting is None or (max_model_len is not None and fitting < max_model_len):
        length = tokens if fitting else least
        needed = need(length)
        total = least_memory(
            footprint, length, prefill_step_size, None if is_default else prefix_cache
        )
        more = f"--memory-limit {_as_flag(total)} if the machine has that"
        used = f"Of {size_text(limit.nbytes)} ({limit.source}) the weights take {size_text(fixed)}"
        if left <= 0:
            raise UsageError(
                f"Not enough memory. {used}. It would take {more}, or a model with fewer bits per "
                "weight, or a smaller one: `mlx-mtp models` lists what fits."
            )
        advice = [more]
        if prefix_cache:
            used += f" and the prefix cache {size_text(prefix_cache)}"
            if needed <= left:
                advice.append(f"--prefix-cache-size {(left - needed) // 10**6}MB or less")
        step = _largest_good(1, prefill_step_size, lambda n: need(length, n) <= room)
        if step is not None:
            advice.append(f"--prefill-step-size {step} or less")
        if fitting:
            advice.append(f"--max-model-len {fitting} or less")
        raise UsageError(
            f"Not enough memory: one request of {length:,} tokens needs {size_text(needed)}. "
            f"{used}. What would do: {', or '.join(advice)}."
        )
    chunk = footprint.chunk_bytes(prefill_step_size, fitting)
    most = min(chunk + (room - chunk) // _LONGER_SHARE, room - footprint.row_bytes(fitting))
    for step in _LONGER_STEPS if longer_steps and backend() else ():
        if (longer := footprint.chunk_bytes(step, fitting)) <= most:
            prefill_step_size, chunk = step, longer
            break
    return MemoryPlan(
        limit=limit,
        footprint=footprint,
        prefix_cache=prefix_cache,
        chunk=chunk,
        prefill_step_size=prefill_step_size,
        rows=room - chunk,
        max_model_len=fitting,
        reduced=fitting < tokens,
    )


def least_memory(
    footprint: Footprint, tokens: int, prefill_step_size: int | None, prefix_cache: int | None
) -> int:
    """The smallest limit, in bytes, for which `plan_memory` has room for a request of `tokens`."""
    step = prefill_step_size or EngineConfig().prefill_step_size
    needed = footprint.chunk_bytes(step, tokens) + footprint.row_bytes(tokens)
    if prefix_cache is None:
        prefix_cache = min(needed // 3 + 1, MOST_PREFIX_CACHE)
    total = footprint.weights + footprint.head + needed + prefix_cache
    return total + client_text_bytes(total + total // 31 + 1)


def default_plan(footprint: Footprint, limit: MemoryLimit, allowed: int) -> MemoryPlan:
    """The memory plan of `serve` without other flags; UsageError if the model doesn't fit."""
    return plan_memory(
        footprint,
        limit,
        allowed=allowed,
        max_model_len=None,
        prefill_step_size=EngineConfig().prefill_step_size,
        prefix_cache=None,
        longer_steps=True,
    )


def _as_flag(nbytes: int) -> str:
    """A size as a flag takes it, rounded up."""
    return f"{-(-nbytes // 10**6)}MB" if nbytes < 10**10 else f"{-(-nbytes // 10**8) / 10:g}GB"


def _largest_good(low: int, high: int, good: Callable[[int], bool]) -> int | None:
    """The largest good number of `low` to `high`; below a good one all must be good."""
    if not good(low):
        return None
    return low - 1 + bisect_left(range(low, high + 1), True, key=lambda number: not good(number))
