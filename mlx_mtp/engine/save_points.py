"""Where along a prompt its state is saved. No arrays: policy alone.

A recurrent state exists only where it was saved, so it is saved where conversations branch: after
the system prompt and the tools, after the latest messages, and at the end. Where nothing is known
of the branches, inside a long prompt, at doubling distances.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

MIN_GAIN = 64
"""A prefill is not cut, and a request does not wait, to save fewer tokens than this."""
NUM_TURNS = 2
"""So many turn ends are saved, counted from the last."""


def turns(prompt: Sequence[int], turn_ends: Container[int]) -> list[int]:
    """Where the messages of a prompt end: lengths of the prefixes up to there, ascending.

    Args:
        prompt: token ids.
        turn_ends: the ids that end a message.
    """
    return [i + 1 for i, token in enumerate(prompt) if token in turn_ends]


def save_points(
    end: int, start: int, turns: Sequence[int], step: int, min_gain: int = MIN_GAIN
) -> list[int]:
    """Lengths of the prefixes to save while a prompt is computed, ascending.

    The end of the first message counts most: what other conversations share mostly ends there, and
    the question behind it may be short. A template may render the end of a prompt, where the answer
    begins, otherwise in the next turn (an answer's reasoning is left out): so the end of the last
    message comes next, however near to the prompt's.

    Args:
        end: tokens of the prompt.
        start: how many of them need not be computed.
        turns: where its messages end.
        step: the prefill's own cuts are at its multiples, and cost nothing.
        min_gain: tokens between two cuts.
    """
    if start == end:
        return []
    wanted = [*turns[:1], *turns[: -NUM_TURNS - 1 : -1]]
    distance = step
    while distance < end:
        wanted.append(distance)
        distance *= 2
    cuts = [start]
    for point in wanted:
        if start < point < end and all(abs(point - cut) >= min_gain for cut in cuts):
            cuts.append(point)
    return [*sorted(cuts[1:]), end]
