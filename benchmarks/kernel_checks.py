"""The kernels, or the portable code, against what they must equal. See `benchmarks.kernels`."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.bench.report import render
from mlx_mtp.kernels import gated_delta, portable, recurrence, short_conv
from mlx_mtp.kernels.gdn_types import QWEN3_NEXT_80B, GDNShape, GDNWindow, PendingWindow
from mlx_mtp.kernels.self_check import RandomInputs

BUNDLED = GDNShape(4, 32, 8, 32)
TOLERANCE = 1e-4
"""Of float32; of a coarser type, times the size of its steps over float32's."""
COARSER = {mx.float32: 1, mx.float16: 1 << 13, mx.bfloat16: 1 << 16}
WINDOWS = (*range(1, 10), 64, 512)
PREVIOUS = tuple(range(9))
LONG = 64
"""From here on only some previous windows are tried: the portable code takes its time."""
ROWS = 3


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for."""

    dtype: mx.Dtype
    ratio: int
    key_dim: int

    @property
    def shape(self) -> GDNShape:
        """Few heads; a Dv that is not Dk."""
        return GDNShape(2, self.key_dim, 2 * self.ratio, 32 if self.key_dim != 32 else 64)

    def __str__(self) -> str:
        return f"{name_of(self.dtype)}, {self.ratio} heads a key, Dk {self.key_dim}"


@dataclass(frozen=True)
class Check:
    """The largest differences of a variant, as shares of what is allowed."""

    what: str
    cases: int
    worst: float
    where: str

    @property
    def ok(self) -> bool:
        """So that NaN is wrong too."""
        return self.worst < 1


def name_of(dtype: mx.Dtype) -> str:
    """As in Python."""
    return str(dtype).removeprefix("mlx.core.")


def variants(full: bool) -> list[Variant]:
    """To be checked; the quick ones have every value, and the usual ones together."""
    if full:
        every = itertools.product(
            (mx.bfloat16, mx.float16, mx.float32), (1, 2, 3), (32, 64, 128, 256)
        )
        return [Variant(*chosen) for chosen in every]
    return [
        Variant(mx.float32, 1, 32),
        Variant(mx.float16, 2, 64),
        Variant(mx.bfloat16, 2, 128),
        Variant(mx.float32, 2, 128),
        Variant(mx.float16, 3, 256),
    ]


class Worst:
    """Keeps the largest difference."""

    def __init__(self) -> None:
        self.share, self.where, self.cases = 0.0, "", 0

    def add(self, ours: Sequence[mx.array], true: Sequence[mx.array], where: str) -> None:
        """Compare; the measure is the tolerance of each array's own type, relative above 1."""
        self.cases += 1
        for a, b in zip(ours, true, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape, where
            with mx.stream(mx.cpu):
                left, right = a.astype(mx.float32), b.astype(mx.float32)
                off = mx.abs(left - right) / mx.maximum(1.0, mx.abs(right))
                share = float(off.max()) / TOLERANCE / COARSER[a.dtype]
            # A NaN is no smaller than anything.
            if not share <= self.share:
                self.share, self.where = share, where


def check_recurrence(variant: Variant) -> Check:
    """Runs with and without lengths, and folds, ragged, of windows that follow one another."""
    cases, worst = RandomInputs(0, variant.shape, variant.dtype), Worst()
    for previous, length in pairs():
        q, window = strided(*cases.window(ROWS, length))
        state, lengths = cases.state(ROWS), cases.counts(ROWS, length)
        pending: PendingWindow | None = None
        kept = true_state = None
        if previous:
            first_q, first = cases.window(ROWS, previous)
            kept = cases.counts(ROWS, previous)
            _, _, pending = gated_delta.run_kernel(first_q, first, state, None, None)
            mx.eval(pending)
            with mx.stream(mx.cpu):
                _, _, true_pending = portable.run(first_q, first, state)
                true_state = portable.fold(true_pending, kept, state)
        else:
            true_state = state
        given = (q, window, state, pending, kept)
        y, folded, after = gated_delta.run_kernel(*given)
        assert after is not None
        advanced_y, advanced, _ = gated_delta.run_kernel(*given, lengths)
        mx.eval(y, folded, after, advanced_y, advanced)
        with mx.stream(mx.cpu):
            true_y, _, true_after = portable.run(q, window, true_state)
            _, true_advanced, _ = portable.run(q, window.cut(lengths), true_state)
            valid = (mx.arange(length) < lengths[:, None])[..., None, None]
            true_cut = mx.where(valid, true_y, mx.zeros_like(true_y))
        ours = [y, folded, after.delta, advanced_y, advanced]
        true = [true_y, true_state, true_after.delta, true_cut, true_advanced]
        if pending is not None and kept is not None:
            ours.append(recurrence.fold(pending, kept, state))
            true.append(true_state)
        worst.add(ours, true, f"T {length} after {previous}")
    return Check(f"recurrence: {variant}", worst.cases, worst.share, worst.where)


def check_inputs(variant: Variant) -> Check:
    """The kernel before it."""
    cases, worst = RandomInputs(1, variant.shape, variant.dtype), Worst()
    convolution = cases.convolution()
    for previous, length in pairs():
        projected, history = cases.projected(ROWS, length), cases.history(ROWS, previous)
        kept = cases.counts(ROWS, previous) if previous else None
        given = (projected, convolution, history, kept)
        q, window, conv_input = short_conv.run_kernel(*given)
        mx.eval(q, window, conv_input)
        with mx.stream(mx.cpu):
            true_q, true_window, true_input = portable.short_conv(*given)
        ours, true = [q, *window, conv_input], [true_q, *true_window, true_input]
        worst.add(ours, true, f"T {length} after {previous}")
    return Check(f"inputs: {variant}", worst.cases, worst.share, worst.where)


def pairs() -> Iterator[tuple[int, int]]:
    """Lengths of a window and of the one before it."""
    for previous, length in itertools.product(PREVIOUS, WINDOWS):
        if length < LONG or previous in (0, 3):
            yield previous, length


def strided(q: mx.array, window: GDNWindow) -> tuple[mx.array, GDNWindow]:
    """The same values as slices of one wide array, as a split of a projection would be."""
    keys = mx.concatenate([q, window.k], axis=-1)
    q, k = mx.split(keys, 2, axis=-1)
    v = mx.concatenate([window.v, window.v], axis=-1)[..., : window.v.shape[-1]]
    return q, window._replace(k=k, v=v)


def check_portable() -> Iterator[Check]:
    """The chunkwise form against mlx-lm's loop, ragged, a part of a window folded before."""
    for name, shape in (("80B", QWEN3_NEXT_80B), ("bundled model", BUNDLED)):
        cases, worst = RandomInputs(0, shape, mx.float32), Worst()
        for previous, length in ((0, 1), (1, 2), (4, 4), (8, 9), (3, 64), (0, 512)):
            q, window = cases.window(ROWS, length)
            state, lengths = cases.state(ROWS), cases.counts(ROWS, length)
            folded = true_state = state
            if previous:
                first_q, first = cases.window(ROWS, previous)
                kept = cases.counts(ROWS, previous)
                _, _, pending = recurrence.run(first_q, first, state, None, None)
                folded = recurrence.fold(pending, kept, state)
                _, true_state = portable.loop(first_q, first, state, kept)
            y, _, _ = recurrence.run(q, window, folded, None, None)
            _, after, _ = recurrence.run(q, window, folded, None, None, lengths)
            true_y, _ = portable.loop(q, window, true_state)
            _, true_after = portable.loop(q, window, true_state, lengths)
            worst.add(
                [y, folded, after], [true_y, true_state, true_after], f"T {length} after {previous}"
            )
        yield Check(f"chunkwise: {name}, float32", worst.cases, worst.share, worst.where)


def checks_table(checks: Sequence[Check]) -> str:
    """Markdown."""
    rows = [
        [c.what, str(c.cases), f"{c.worst:.3f}", c.where, "ok" if c.ok else "FAILED"]
        for c in checks
    ]
    return render(["against the reference", "cases", "worst / allowed", "at", "check"], rows)
