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
_SHORT_ROW = 4096
_MORE = "If the machine has more memory than that, say so with --memory-limit."


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

    def shares(self) -> str:
        """What each part gets, in words."""
        model = self.footprint
        parts = {
            "weights": model.weights,
            "head": model.head,
            "prefix cache": self.prefix_cache,
            "prefill chunk": self.chunk,
            "rows": self.rows,
        }
        return ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts.items() if nbytes)

    def rows_at_once(self, max_num_seqs: int) -> str:
        """How many rows fit, full ones and short ones, in words."""
        counts = dict.fromkeys((self.max_model_len, min(_SHORT_ROW, self.max_model_len)))
        return " or ".join(f"{self.num_rows(n, max_num_seqs)} of {n:,} tokens" for n in counts)

    def lines(self, max_num_seqs: int) -> list[str]:
        """For the banner."""
        less = ", less than the model allows: there is no memory for more" if self.reduced else ""
        return [
            f"{size_text(self.limit.nbytes)} ({self.limit.source}): {self.shares()}",
            f"rows at once: {self.rows_at_once(max_num_seqs)}; context {self.max_model_len:,} "
            f"tokens{less}",
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
            f"Not enough memory: the model's weights take {size_text(fixed)} of "
            f"{size_text(limit.nbytes)} ({limit.source}). Use a model with fewer bits per weight "
            f"or a smaller one. {_MORE}"
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
    kept = f", and the prefix cache takes {size_text(prefix_cache)} of that" if prefix_cache else ""
    flags = "a smaller --prefill-step-size"
    if prefix_cache:
        flags += " or --prefix-cache-size"
    asked = tokens if found else least
    other = "or a smaller model" if found is None else f"or --max-model-len {found} or less"
    return (
        f"Not enough memory: one request of {asked:,} tokens needs {size_text(need(asked))}. Of "
        f"{size_text(limit.nbytes)} ({limit.source}) the weights leave "
        f"{size_text(limit.nbytes - fixed)}{kept}. Use {flags}, {other}. {_MORE}"
    )


def largest(low: int, high: int, good: Callable[[int], bool]) -> int | None:
    """The largest number from `low` to `high` that is good, if all below a good one are good."""
    if not good(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
