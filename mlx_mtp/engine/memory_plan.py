"""What serving a model will take, against what the machine has: said, or refused, at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_mtp.engine.admission import Admission
from mlx_mtp.engine.footprint import Footprint
from mlx_mtp.errors import UsageError
from mlx_mtp.machine import MemoryLimit
from mlx_mtp.units import size_text

MOST_PREFIX_CACHE = 8 * 10**9
"""Bytes that the prefix cache takes by itself."""
_LEAST_TOKENS = 512
"""A server whose context is shorter is of no use; it is not started."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory is shared out, in bytes.

    Args:
        limit: of it all.
        footprint: of the model.
        prefix_cache: most that the prefix cache takes.
        chunk: most that a prefill chunk takes beside the caches.
        rows: what is left for rows.
        max_model_len: most tokens of a request for which there is memory, the model's or the
            setting's own limit included.
        reduced: memory made that less than what the model allows.
    """

    limit: MemoryLimit
    footprint: Footprint
    prefix_cache: int
    chunk: int
    rows: int
    max_model_len: int
    reduced: bool

    def admission(self) -> Admission:
        """Lets in the rows that fit."""
        return Admission(self.rows, self.footprint.rows)

    def num_rows(self, tokens: int, most: int) -> int:
        """How many rows of so many tokens fit, up to `most`."""
        return largest(1, most, lambda n: self.footprint.rows(n, tokens) <= self.rows) or 0

    def lines(self, max_num_seqs: int) -> list[str]:
        """For the banner."""
        print_ = self.footprint
        parts = [f"{size_text(print_.weights)} weights"]
        parts += [f"{size_text(print_.head)} head"] if print_.head else []
        parts += [f"{size_text(self.prefix_cache)} prefix cache"] if self.prefix_cache else []
        parts += [f"{size_text(self.chunk)} a prefill chunk", f"{size_text(self.rows)} rows"]
        short = min(4096, self.max_model_len)
        counts = dict.fromkeys((self.max_model_len, short))
        fits = [f"{self.num_rows(n, max_num_seqs)} of {n:,} tokens" for n in counts]
        less = "; less than the model allows, for want of memory" if self.reduced else ""
        return [
            f"{size_text(self.limit.nbytes)} ({self.limit.source}): {', '.join(parts)}",
            f"rows at once: {', or '.join(fits)}; context {self.max_model_len:,} tokens{less}",
        ]


def plan_memory(
    footprint: Footprint,
    limit: MemoryLimit,
    *,
    allowed: int,
    wanted: int | None,
    prefill_step_size: int,
    prefix_cache: int | None = 0,
) -> MemoryPlan:
    """Share the memory out.

    Without `wanted` the context is cut to what one row has memory for; what was asked for is not
    cut but refused.

    Args:
        footprint: of the model.
        limit: of all.
        allowed: most tokens that the model allows.
        wanted: `--max-model-len`, if it was given; not above `allowed`.
        prefill_step_size: tokens in a chunk.
        prefix_cache: most bytes of the prefix cache; None: a quarter of what the weights leave,
            and at most `MOST_PREFIX_CACHE`.

    Raises:
        UsageError: it can't fit, with the numbers and the flags that help.
    """
    fixed = footprint.weights + footprint.head
    if fixed >= limit.nbytes:
        raise UsageError(
            f"The model's weights take {size_text(fixed)}, but there are "
            f"{size_text(limit.nbytes)} ({limit.source}). Use a model that is quantized to fewer "
            "bits, or a smaller one; --memory-limit says that there is more."
        )
    if prefix_cache is None:
        prefix_cache = min((limit.nbytes - fixed) // 4, MOST_PREFIX_CACHE)
    room = limit.nbytes - fixed - prefix_cache

    def need(tokens: int) -> int:
        chunk = footprint.chunk(min(prefill_step_size, tokens), tokens)
        return chunk + footprint.rows(1, tokens)

    tokens = wanted or allowed
    least = min(_LEAST_TOKENS, tokens)
    found = largest(least, tokens, lambda n: need(n) <= room)
    if found is None or (wanted is not None and found < wanted):
        raise UsageError(_refusal(limit, fixed, prefix_cache, need, tokens, least, found))
    chunk = footprint.chunk(min(prefill_step_size, found), found)
    return MemoryPlan(
        limit=limit,
        footprint=footprint,
        prefix_cache=prefix_cache,
        chunk=chunk,
        rows=room - chunk,
        max_model_len=found,
        reduced=found < tokens,
    )


def _refusal(
    limit: MemoryLimit,
    fixed: int,
    prefix_cache: int,
    need: Callable[[int], int],
    tokens: int,
    least: int,
    found: int | None,
) -> str:
    kept = f" and {size_text(prefix_cache)} for the prefix cache" if prefix_cache else ""
    flags = "a smaller --prefill-step-size"
    if prefix_cache:
        flags += " or --prefix-cache-size"
    said = (
        f"One request of {tokens if found else least:,} tokens takes "
        f"{size_text(need(tokens if found else least))}, but of {size_text(limit.nbytes)} "
        f"({limit.source}) the weights leave {size_text(limit.nbytes - fixed)}{kept}. "
    )
    if found is None:
        return f"{said}Use {flags}, or a smaller model; --memory-limit says that there is more."
    return (
        f"{said}Use --max-model-len {found} or less, or {flags}; --memory-limit says that there "
        "is more."
    )


def largest(low: int, high: int, good: Callable[[int], bool]) -> int | None:
    """The largest number from `low` to `high` that is good, if all below a good one are good."""
    if not good(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
