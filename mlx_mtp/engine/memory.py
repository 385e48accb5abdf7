"""The memory that serving a model takes, how it is divided, and which rows fit."""

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
from mlx_mtp.vision.placed import MAX_EMBEDDED_BYTES

if TYPE_CHECKING:
    from mlx_mtp.models.model import LoadedModel

_COPIES = 2  # copies of the recurrent states that exist while rows join or leave the batch
_WINDOWS = 3  # windows of positions beyond a row's tokens: in flight, and the head's drafts
_LOGITS = 6  # float32 arrays of a vocabulary: logits, processed logits, noise, and sorting
PROMPT_POSITIONS = 32  # positions whose logits exist at the same time, for logprobs of a prompt
_PROMPT_LOGITS = 8  # float32 arrays, measured: logits, logarithms, and the search for the largest
_LONGER_STEPS = (2048, 1024)  # tokens of chunks that a GPU may compute faster than the default's
_LONGER_SHARE = 8  # a longer chunk takes at most 1/8 of the memory that the default leaves for rows
_EXPANDED = 4  # dequantized copies of a layer's largest weights that exist at a time, on CUDA
_MARGIN = 1.5  # measured: a chunk takes up to 1.5 times the activations of one layer of each kind

MOST_PREFIX_CACHE = 8 * 10**9  # maximum bytes of the prefix cache by default
_LEAST_TOKENS = 512  # a server with a shorter context is not started
_SHORT_ROW = 8000  # tokens of a row, as `rows_at_once` shows it
_LONG_ROWS = (100_000, 32_000)  # tokens of an agent's row, likewise


@dataclass(frozen=True)
class Footprint:
    """The memory that a model takes, in bytes, and what it depends on."""

    weights: int  # without the MTP head's
    head: int  # the MTP head, with its reduced lm_head
    caches: CacheMemory
    depth: int  # maximum drafts per row and step
    vocab_size: int
    vision: int = 0  # the tower, its scratch for the largest image, and the rows of recent images

    def row_bytes(self, tokens: int) -> int:
        """Returns the maximum bytes of a row of `tokens` tokens, without its prefill."""
        reach, window = tokens + _WINDOWS * (self.depth + 1), self.depth + 1
        kv = self.caches.most_kv(reach)
        # A row that outgrows its size class is copied layer by layer.
        copied = kv // len(self.caches.attention)
        states = _COPIES * self.caches.states_and_window(self.depth)
        scores = window * self.score_bytes(reach + STRIDE)
        return kv + copied + states + scores + window * self.vocab_size * 4 * _LOGITS

    def chunk_bytes(self, step: int, tokens: int) -> int:
        """Returns the maximum bytes, besides the caches, of a chunk of at most `step` tokens.

        `tokens` is the length of the prompt.
        """
        step = min(step, tokens)
        # One layer's attention scores and mask, as not every head size has a fused kernel.
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
        """Returns the bytes of one position's attention scores over `tokens` in one layer."""
        return self.caches.attention[0].heads * tokens * self.caches.itemsize


def footprint(
    model: LoadedModel, depth: int, num_draft_ids: int | None = None, image_tokens: int = 0
) -> Footprint:
    """Returns the footprint of a loaded model.

    `num_draft_ids`: size of a reduced draft vocabulary; `image_tokens`: maximum tokens of an image.
    """
    weights, head = model.nbytes()
    if model.head is not None and num_draft_ids is not None:
        head += num_draft_ids * model.row_nbytes()
    caches = CacheMemory(tuple(model.layer_specs), model.head is not None, model.dtype.size)
    vision = 0
    if model.tower is not None:
        scratch = model.tower.shape.scratch(image_tokens, model.dtype.size)
        vision = model.tower_nbytes + scratch + MAX_EMBEDDED_BYTES
    return Footprint(weights, head, caches, depth, model.vocab_size, vision)


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory is divided, in bytes."""

    limit: MemoryLimit
    footprint: Footprint
    prefix_cache: int  # limit of the prefix cache
    chunk: int  # memory of a prefill chunk, besides the caches
    prefill_step_size: int  # tokens of that chunk
    rows: int  # memory left for rows
    max_model_len: int  # maximum tokens of a request: the model's limit, the setting, or what fits
    reduced: bool  # True if `max_model_len` is what fits, less than the model's limit

    def usage(self, lengths: Iterable[int]) -> float:
        """Returns the maximum share of the memory for rows that rows of these lengths take."""
        return sum(map(self.footprint.row_bytes, lengths)) / self.rows

    def num_rows(self, tokens: int, most: int, beside: int = 0) -> int:
        """Returns how many rows of `tokens` fit, with one of `beside` tokens if that is not 0.

        At most `most` rows are assumed to run, that one included.
        """
        left = self.rows - (self.footprint.row_bytes(beside) if beside else 0)
        return max(min(left // self.footprint.row_bytes(tokens), most - (beside > 0)), 0)

    def bytes_by_use(self) -> dict[str, int]:
        """Returns the planned bytes by use."""
        parts = {"weights": self.footprint.weights, "head": self.footprint.head}
        parts |= {"vision": self.footprint.vision} if self.footprint.vision else {}
        parts |= {"prefix cache": self.prefix_cache, "prefill chunk": self.chunk}
        parts |= {"texts": client_text_bytes(self.limit.nbytes)}
        return parts | {"requests": self.rows}

    def shares(self) -> str:
        parts = self.bytes_by_use().items()
        return ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts if nbytes)

    def rows_at_once(self, max_num_seqs: int) -> str:
        """Returns e.g. "16 of 8,000 tokens or 2 of 100,000 or 1 of 100,000 and 9 of 8,000"."""
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
    allowed: int,  # maximum tokens of a request that the model allows
    max_model_len: int | None,  # --max-model-len, at most `allowed`; None: what fits
    prefill_step_size: int,
    longer_steps: bool = False,  # plan longer chunks on a GPU if they fit
    prefix_cache: int | None = 0,  # bytes; None: a quarter of what the weights leave, at most 8 GB
) -> MemoryPlan:
    """Divide the memory; raises UsageError, with flags that would help, if a request can't fit."""
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
    """Returns the smallest limit, in bytes, with which a request of `tokens` tokens fits."""
    step = prefill_step_size or EngineConfig().prefill_step_size
    needed = footprint.chunk_bytes(step, tokens) + footprint.row_bytes(tokens)
    if prefix_cache is None:
        prefix_cache = min(needed // 3 + 1, MOST_PREFIX_CACHE)
    total = footprint.weights + footprint.head + needed + prefix_cache
    return total + client_text_bytes(total + total // 31 + 1)


def default_plan(footprint: Footprint, limit: MemoryLimit, allowed: int) -> MemoryPlan:
    """Returns the plan of `serve` without other flags; raises UsageError if the model can't fit."""
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
    """The largest good number in [low, high], or None; all below a good number must be good."""
    if not good(low):
        return None
    return low - 1 + bisect_left(range(low, high + 1), True, key=lambda number: not good(number))
