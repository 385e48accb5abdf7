"""The kernels of the gated delta rule: whether they are right, and how fast."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from benchmarks import Row, Rows, row
from benchmarks.timed import take_turns
from mlx_mtp.errors import BenchError
from mlx_mtp.kernels import gated_delta, gpu, portable, recurrence, short_conv
from mlx_mtp.kernels.gdn_types import QWEN3_NEXT_80B, GDNShape, GDNWindow, PendingWindow
from mlx_mtp.kernels.self_check import RandomInputs

_BUNDLED = GDNShape(4, 32, 8, 32)
_SHAPES = (("80B", QWEN3_NEXT_80B), ("bundled model", _BUNDLED))
_TOLERANCE = 1e-4  # of float32; of a coarser type, times the size of its steps over float32's
_COARSER = {mx.float32: 1, mx.float16: 1 << 13, mx.bfloat16: 1 << 16}
_WINDOWS = (*range(1, 10), 64, 512)
_PREVIOUS = range(9)
_LONG = 64  # From here on only some previous windows are tried: the portable code takes its time.
_ROWS = 3
_REPEATS = 5
_CONTENDERS = ("kernel", "mlx-lm's kernel", "mlx-lm's loop", "chunkwise")
_Call = Callable[..., Any]


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: mx.Dtype
    ratio: int
    key_dim: int

    @property
    def shape(self) -> GDNShape:
        """Few heads; a Dv that is not Dk."""
        return GDNShape(2, self.key_dim, 2 * self.ratio, 32 if self.key_dim != 32 else 64)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return f"{dtype}, {self.ratio} heads a key, Dk {self.key_dim}"


class Check:
    """The largest difference of some cases, as a share of what is allowed."""

    def __init__(self, what: str) -> None:
        self.what, self.cases, self.worst, self.where = what, 0, 0.0, ""

    def add(self, ours: Sequence[mx.array], true: Sequence[mx.array], where: str) -> None:
        """Compare; the measure is the tolerance of each array's own type, relative above 1."""
        self.cases += 1
        for a, b in zip(ours, true, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape, where
            with mx.stream(mx.cpu):
                left, right = a.astype(mx.float32), b.astype(mx.float32)
                off = mx.abs(left - right) / mx.maximum(1.0, mx.abs(right))
                share = float(off.max()) / _TOLERANCE / _COARSER[a.dtype]
            # A NaN is no smaller than anything.
            if not share <= self.worst:
                self.worst, self.where = share, where

    @property
    def ok(self) -> bool:
        """False for NaN too."""
        return self.worst < 1

    def __repr__(self) -> str:
        return f"{self.what}: {self.worst:.3g} of what is allowed, at {self.where}"


def kernels(full: bool = False) -> Rows:
    """The kernels of the gated delta rule: whether they are right, and how fast, beside mlx-lm's.

    On a GPU: both kernels against the portable code (in float32 on the CPU) over windows of 1 to 9,
    64 and 512 positions after windows of 0 to 8, with ragged lengths; then microseconds of a call
    beside mlx-lm's loop, mlx-lm's kernel (on Metal) and the portable code, at the shape of
    Qwen3-Next-80B in bfloat16, and the ratio to the first. On a CPU: the portable code beside
    mlx-lm's loop over tokens. The status is 1 if a check failed.

    Args:
        full: all 36 combinations of type, head ratio and Dk, which takes many minutes to compile,
            not the five in which each value occurs
    """
    failed = []
    for check in _checks(full) if gpu.backend() is not None else ():
        failed += [] if check.ok else [check.what]
        figures = check.what, check.cases, check.worst, check.where, check.ok
        yield row("against the portable code | cases | worst / allowed | at | ok", *figures)
    yield from _gpu_timings() if gpu.backend() is not None else _cpu_timings()
    if failed:
        raise BenchError(f"checks failed: {'; '.join(failed)}.")


def _checks(full: bool) -> Iterator[Check]:
    types = (mx.bfloat16, mx.float16, mx.float32)
    variants = [Variant(*each) for each in itertools.product(types, (1, 2, 3), (32, 64, 128, 256))]
    quick = [(mx.float32, 1, 32), (mx.float16, 2, 64), (mx.bfloat16, 2, 128)]
    quick += [(mx.float32, 2, 128), (mx.float16, 3, 256)]
    for variant in variants if full else itertools.starmap(Variant, quick):
        yield check_recurrence(variant)
        yield check_inputs(variant)


def check_recurrence(variant: Variant) -> Check:
    """Runs with and without lengths, and folds, ragged, of windows that follow one another."""
    cases, check = RandomInputs(0, variant.shape, variant.dtype), Check(f"recurrence: {variant}")
    for previous, length in _pairs():
        q, window = _strided(*cases.window(_ROWS, length))
        state, lengths = cases.state(_ROWS), cases.counts(_ROWS, length)
        pending: PendingWindow | None = None
        kept, true_state = None, state
        if previous:
            first_q, first = cases.window(_ROWS, previous)
            kept = cases.counts(_ROWS, previous)
            _, _, pending = gated_delta.run_kernel(first_q, first, state, None, None)
            mx.eval(pending)
            with mx.stream(mx.cpu):
                _, _, true_pending = portable.run_chunked(first_q, first, state)
                true_state = portable.fold(true_pending, kept, state)
        given = (q, window, state, pending, kept)
        y, folded, after = gated_delta.run_kernel(*given)
        assert after is not None
        advanced_y, advanced, _ = gated_delta.run_kernel(*given, lengths)
        mx.eval(y, folded, after, advanced_y, advanced)
        with mx.stream(mx.cpu):
            true_y, _, true_after = portable.run_chunked(q, window, true_state)
            _, true_advanced, _ = portable.run_chunked(q, window.masked(lengths), true_state)
            valid = (mx.arange(length) < lengths[:, None])[..., None, None]
            true_cut = mx.where(valid, true_y, mx.zeros_like(true_y))
        ours = [y, folded, after.delta, advanced_y, advanced]
        true = [true_y, true_state, true_after.delta, true_cut, true_advanced]
        if pending is not None and kept is not None:
            ours.append(recurrence.fold(pending, kept, state))
            true.append(true_state)
        check.add(ours, true, f"T {length} after {previous}")
    return check


def check_inputs(variant: Variant) -> Check:
    """The kernel before it."""
    cases, check = RandomInputs(1, variant.shape, variant.dtype), Check(f"inputs: {variant}")
    convolution = cases.convolution()
    for previous, length in _pairs():
        projected, history = cases.projected(_ROWS, length), cases.history(_ROWS, previous)
        kept = cases.counts(_ROWS, previous) if previous else None
        given = (projected, convolution, history, kept)
        q, window, conv_input = short_conv.run_kernel(*given)
        mx.eval(q, window, conv_input)
        with mx.stream(mx.cpu):
            true_q, true_window, true_input = portable.short_conv(*given)
        ours, true = [q, *window, conv_input], [true_q, *true_window, true_input]
        check.add(ours, true, f"T {length} after {previous}")
    return check


def _pairs() -> Iterator[tuple[int, int]]:
    """Lengths of the window before one, and of the window."""
    for previous, length in itertools.product(_PREVIOUS, _WINDOWS):
        if length < _LONG or previous in (0, 3):
            yield previous, length


def _strided(q: mx.array, window: GDNWindow) -> tuple[mx.array, GDNWindow]:
    """The same values as slices of one wide array, as a split of a projection would be."""
    q, k = mx.split(mx.concatenate([q, window.k], axis=-1), 2, axis=-1)
    v = mx.concatenate([window.v, window.v], axis=-1)[..., : window.v.shape[-1]]
    return q, window._replace(k=k, v=v)


def _gpu_timings() -> Iterator[Row]:
    cases = RandomInputs(2, QWEN3_NEXT_80B, mx.bfloat16)
    for rows, length in itertools.product((1, 4, 16, 32), (1, 2, 4)):
        yield _timing("verify", cases, rows, length, 48)
    for rows, length in itertools.product((1, 4, 16, 32), (1, 512)):
        yield _timing("advance", cases, rows, length, 48 if length == 1 else 4)


def _cpu_timings() -> Iterator[Row]:
    for (name, shape), (length, calls) in itertools.product(_SHAPES, ((512, 1), (4, 8))):
        yield _timing(f"advance, {name}", RandomInputs(2, shape, mx.float32), 1, length, calls)


def _timing(what: str, cases: RandomInputs, rows: int, length: int, calls: int) -> Row:
    """Medians of one of `calls` calls."""
    q, window = cases.window(rows, length)
    start, kept = cases.state(rows), mx.full((rows,), length, dtype=mx.int32)
    verify, on_gpu, scaled = what == "verify", gpu.backend() is not None, q * q.shape[-1] ** -0.5
    mx.eval(q, window, start, kept, scaled)
    lengths = None if verify else kept

    def ours(state: mx.array, pending: PendingWindow | None) -> Any:
        return recurrence.run_window(q, window, state, pending, kept, lengths)

    def chunkwise(state: mx.array, pending: PendingWindow | None) -> Any:
        state = state if pending is None else portable.fold(pending, kept, state)
        y, state, after = portable.run_chunked(q, window, state, advance=not verify)
        return y, state, after if verify else None

    def theirs(run: Callable[..., Any]) -> _Call:  # always advances
        return lambda state: run(scaled, window.k, window.v, window.g, window.beta, state)

    chains: dict[str, _Call | None] = dict.fromkeys(_CONTENDERS)
    chains["chunkwise"] = _chain(chunkwise, calls, start, None)
    if on_gpu:
        chains["kernel"] = _chain(ours, calls, start, None)
    if on_gpu and mx.metal.is_available():
        kernel = theirs(mlx_lm_gated_delta.gated_delta_kernel)
        chains["mlx-lm's kernel"] = _chain(kernel, calls, start)
    if length == 1 or not on_gpu or rows <= 4:  # Tens of thousands of launches elsewhere.
        loop = theirs(mlx_lm_gated_delta.gated_delta_ops)
        chains["mlx-lm's loop"] = _chain(loop, calls, start)
    times = take_turns({name: each for name, each in chains.items() if each}, _REPEATS)
    us = {name: 1e6 * statistics.median(each) / calls for name, each in times.items()}
    first, line = next(iter(us.values())), row("us a call | rows | T", what, rows, length)
    for name in chains:
        line |= {name: us.get(name), f"{name}, ratio": us[name] / first if name in us else None}
    return line


def _chain(run: _Call, calls: int, *state: Any) -> _Call:
    """So many calls, each of which continues from the state that the last one left.

    Launches that don't depend on each other would run side by side.
    """
    states = [state]

    def repeat() -> list[Any]:
        for _ in range(calls):
            y, *states[0] = run(*states[0])
        return [y, states[0]]

    return repeat
