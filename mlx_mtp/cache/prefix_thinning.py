"""Which snapshots a chain of prefixes can do without."""

from __future__ import annotations

from collections.abc import Sequence

NUM_RECENT = 3
"""So many snapshots at the end of a chain stay whatever their distance."""


def spare(ends: Sequence[int], last: int) -> list[int]:
    """Which snapshots of a chain to forget, so that their distances from its end about double.

    The first and the latest stay. Of the others one goes if the next before it is at most twice as
    far from the end as the next behind it.

    Args:
        ends: of those before the last, ascending.
        last: end of the chain.
    """
    dropped: list[int] = []
    older = list(ends[:-NUM_RECENT])
    kept = ends[-NUM_RECENT] if older else last
    while len(older) > 1:
        end = older.pop()
        if last - older[-1] <= 2 * (last - kept):
            dropped.append(end)
        else:
            kept = end
    return dropped
