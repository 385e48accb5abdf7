"""A GatedDeltaNet layer's window in one launch: from its input projections to its output's norm.

In a decode step of few rows the convolution (`short_conv`), the recurrence (`gated_delta`) and the
gated norm (`norms.GATED_NORM`) take longer to launch than to compute. Here a threadgroup has one
head of one row, so what they hand on stays in its memory. The sources are theirs, and so must be
the bits of the results: `fits` decides by the number of rows, which must not change a row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mtp.kernels import gated_delta, gpu, norms, portable, self_check, short_conv
from mlx_mtp.kernels.gdn_types import GDNProjections, GDNShape, PendingWindow, ShortConvWeights
from mlx_mtp.kernels.view import Operand, View, arrays_and_constants, column_view, dense, to_arrays

_ROOM = 8  # positions that a threadgroup has memory for
# With more threadgroups, three launches are as fast: of theirs, more run at the same time (H200).
_MOST_GROUPS = 256
_L, _R = 16, 4  # lanes that share a row of the state, and rows of each lane

_CONVOLVE = short_conv.source(
    "(is_value || keeps_key)",
    "(inputs + kind * ROOM * Dk + t * dim)",
    "gates[t]",
    "gates[ROOM + t]",
)
_FOLD = gated_delta.FOLD.replace("num_kept", "num_folded")
_NORM = norms.GATED_HEAD.replace("DIM", "Dv").replace("weight[", "norm_weight[")
_NORM = _NORM.replace("INVERSE_EPS", "INVERSE_NORM_EPS")
_BODY = f"""
    const int hv = grid_z % Hv;
    const int b = grid_z / Hv;
    const int n = grid_z;
    const int hk = hv / (Hv / Hk);
    const int length = q_shape[0] / num_kept_shape[0];
    const int part = lane % L;
    const int first = (warp * (32 / L) + lane / L) * R;
    THREADGROUP(InT, inputs, ROOM * (2 * Dk + Dv));  // queries, keys, then values
    THREADGROUP(float, gates, 2 * ROOM);  // decays, then write strengths
    THREADGROUP(InT, outputs, ROOM * Dv);
    {gated_delta.LOAD}
    // Value heads share a key head: one of them keeps its inputs and its keys.
    const bool keeps_key = hv % (Hv / Hk) == 0;
    for (int task = warp; task < 3 * length; task += WARPS) {{
      const int begin = task / 3;
      const int kind = task % 3;
      const int head = kind == 2 ? 2 * Hk + hv : kind * Hk + hk;
      {_CONVOLVE}
    }}
    BARRIER;
    if (!ADVANCE) {{
      for (int i = 32 * warp + lane; keeps_key && i < length * Dk; i += 32 * WARPS) {{
        keys[((first_token + i / Dk) * Hk + hk) * Dk + i % Dk] = inputs[ROOM * Dk + i];
      }}
      for (int t = 32 * warp + lane; t < length; t += 32 * WARPS) {{
        decays[(first_token + t) * Hv + hv] = gates[t];
      }}
    }}
    {_FOLD}
    const auto all_queries = inputs + part;
    const auto all_keys = inputs + ROOM * Dk + part;
    const auto all_values = inputs + 2 * ROOM * Dk + first;
    const auto all_decays = gates;
    const auto all_strengths = gates + ROOM;
    const auto all_results = outputs + first;
    constexpr int KEY_STEP = Dk, QUERY_STEP = Dk, VALUE_STEP = Dv;
    constexpr int DECAY_STEP = 1, STRENGTH_STEP = 1, RESULT_STEP = Dv;
    {gated_delta.WINDOW}
    BARRIER;
    for (int t = warp; t < length; t += WARPS) {{
      const size_t token = first_token + t;
      const auto from = outputs + t * Dv;
      const auto gates = z + Z_AT + token * Z_BY0 + hk * Z_BY1 + hv % (Hv / Hk) * Z_BY2;
      const auto to = y + (token * Hv + hv) * Dv;
      {_NORM}
    }}
"""


class OutputGate(NamedTuple):
    """The gated norm of a layer's outputs: rms_norm(y) * weight * silu(z)."""

    z: Operand  # [B * T, Hk, R, Dv]
    weight: mx.array  # [Dv]
    eps: float

    def apply(self, y: mx.array) -> mx.array:
        """Returns the outputs y [B, T, Hv, Dv] normed and gated, [B * T, Hv * Dv]."""
        heads, dim = y.shape[-2:]
        shape = norms.NormShape(dim, self.eps, heads, ratio=self.z.shape[2])
        return norms.GATED_NORM(shape, self.z, y, self.weight)[0]


class StepInputs(NamedTuple):
    """The arguments of `short_conv.convolve` and `recurrence.run_window`, and the outputs' norm."""

    projected: GDNProjections  # of T positions
    convolution: ShortConvWeights
    gate: OutputGate
    state: mx.array
    history: mx.array
    previous: PendingWindow | None
    num_kept: mx.array | None
    lengths: mx.array | None


_Results = tuple[mx.array, mx.array, PendingWindow | None, mx.array]
_PROJECTED, _PREVIOUS = "qkvab", ("previous_k", "previous_delta", "previous_g")


@functools.cache
def _kernel(advance: bool) -> gpu.Kernel:
    """Returns the kernel; if it advances the state, it leaves no window to fold."""
    inputs = ["q", "k", "v", "a", "bb", "z", *_PREVIOUS, "weight", "log_decay", "dt_bias"]
    inputs += ["norm_weight", "state", "history", "num_kept", "num_folded", "lengths"]
    outputs, body = ["y", "state_out", "conv_input", "delta", "keys", "decays"], _BODY
    if advance:  # Code that never runs still names these.
        unused = ("const auto delta = state_out, decays = state_out", "const auto keys = y")
        outputs, body = outputs[:3], "".join(f"    {each};\n" for each in unused) + _BODY
    name, columns = "gated_delta_step", (*"qkva", "bb", "z")
    return gpu.Kernel(name, inputs, outputs, body, contiguous=True, columns=columns)


def run_kernel(inputs: StepInputs) -> _Results:
    """Run a window from the projections to the outputs' norm.

    Returns the normed and gated outputs [B * T, Hv * Dv], the state, the window that the next call
    must fold, and the convolution's input.
    """
    projected, convolution, gate, state, history, previous, num_kept, lengths = inputs
    shape, dtype = short_conv.shape_of(projected, convolution), projected.q.dtype
    batch, length = projected.q.shape[:2]
    none = gpu.zeros(batch)
    kept = none if num_kept is None else num_kept
    counts = kept, none if previous is None else kept, none if lengths is None else lengths
    arrays, constants = arrays_and_constants(_PROJECTED, map(short_conv.by_token, projected))
    z = View.of(gate.z)
    advance, warps = lengths is not None, _warps(shape)
    key_heads, _, heads, value_dim, _ = shape
    tokens = batch, length
    results = [
        ((batch * length, heads * value_dim), dtype),
        (state.shape, mx.float32),
        ((batch, shape.conv_size - 1 + length, shape.channels), dtype),
        ((*tokens, heads, value_dim), mx.float32),
        ((*tokens, key_heads, shape.key_dim), dtype),
        ((*tokens, heads), mx.float32),
    ]
    if previous is None:  # Arrays that are not read, with the constants of a window of this kernel.
        unread = zip((state, history, state), results[3:])
        delta, keys, decays = (View(a, size, dense(size)) for a, (size, _) in unread)
        previous = PendingWindow(keys, delta, decays)
    folded, more = arrays_and_constants(_PREVIOUS, previous)
    y, after, conv_input, *window = _kernel(advance)(
        [*arrays, z.array, *folded, *convolution, gate.weight, state, history, *counts],
        {"InT": dtype, "ValueT": dtype, "StrengthT": mx.float32, "ADVANCE": advance, "AHEAD": 1}
        | {"RUN": 1, "SIZE": shape.conv_size, "ROOM": _ROOM, "WARPS": warps}
        | {"INVERSE_EPS": round(1 / portable.EPS), "INVERSE_NORM_EPS": round(1 / gate.eps)}
        | {"L": _L, "R": _R, **shape.sizes(), **constants, **more, **z.constants("Z")},
        (1, warps, batch * heads),
        results[: 3 if advance else 6],
        warps,
    )
    if advance:
        return y, after, None, conv_input
    return y, after, PendingWindow(window[1], window[0], window[2]), conv_input


def run_kernels(inputs: StepInputs) -> _Results:
    """`run_kernel`, by the three kernels whose sources it has."""
    projected, convolution, gate, state, history, previous, num_kept, lengths = inputs
    q, window, conv_input = short_conv.run_kernel(projected, convolution, history, num_kept)
    folded = previous, num_kept, lengths
    y, after, pending = gated_delta.run_kernel(q, window, state, *folded)
    return gate.apply(y), after, pending, conv_input


def fits(projected: GDNProjections, convolution: ShortConvWeights) -> bool:
    """Returns whether the kernel runs a window of these shapes and types, and is the fastest."""
    shape, (rows, length) = short_conv.shape_of(projected, convolution), projected.q.shape[:2]
    if length > _ROOM or rows * shape.value_heads > _MOST_GROUPS:
        return False
    return GATED_DELTA_STEP.works(shape, projected.q.dtype)


def _warps(shape: GDNShape) -> int:
    return shape.value_dim * _L // (gpu.LANES * _R)


def _applies(shape: GDNShape, dtype: mx.Dtype) -> bool:
    parts = (gated_delta.GATED_DELTA, shape), (short_conv.SHORT_CONV, shape)
    return shape.value_dim <= 128 and all(part.works(each, dtype) for part, each in parts)


def random_gate(inputs: self_check.RandomInputs, tokens: int) -> OutputGate:
    """Returns a gate for a number of tokens, a view as in the models."""
    hk, _, hv, dv, _ = inputs.shape
    wide, weight = (inputs.normal(*s).astype(inputs.dtype) for s in ((tokens, 2 * hv * dv), (dv,)))
    z = column_view(wide, (tokens,), dv, 2 * hv // hk * dv, (hk, hv // hk, dv))
    return OutputGate(z, weight, 1e-6)


def _error(shape: GDNShape, dtype: mx.Dtype) -> float:
    """Returns 0 if windows in a row have the bits of `run_kernels`, else raises ValueError.

    Two rows keep parts of the windows; those of the last windows are known in advance. Once each
    of the two goes on from the other's results, as when the number of rows changes.
    """
    inputs = self_check.RandomInputs(0, shape, dtype)
    convolution = inputs.convolution()
    held: list[Any] = [(inputs.state(2), inputs.history(2, 0), None, None)] * 2
    runs: list[Callable[..., Any]] = [run_kernel, run_kernels]
    parts = (2, [1, 2], False), (3, [3, 0], False), (6, [2, 6], False), (1, [1, 1], True)
    for length, counts, known in (*parts, (5, [5, 4], True)):
        given = inputs.projected(2, length), convolution, random_gate(inputs, 2 * length)
        kept, found = mx.array(counts), list[list[mx.array]]()
        for number, run in enumerate(runs):
            state, history, pending, before = held[number]
            own = *given, state, history, pending, before, kept if known else None
            y, state, pending, history = run(StepInputs(*own))
            held[number] = state, history, pending, kept
            found.append([y, state, history, *to_arrays(pending or ())])
        if not all(mx.array_equal(a, b) for a, b in zip(*found, strict=True)):
            raise ValueError("its bits are not those of the kernels that it consists of")
        if length == 3:
            held.reverse()
    return 0.0


def _arguments(shape: GDNShape, dtype: mx.Dtype, tokens: int) -> tuple[StepInputs]:
    inputs = self_check.RandomInputs(0, shape, dtype)
    given = inputs.projected(1, tokens), inputs.convolution(), random_gate(inputs, tokens)
    return (StepInputs(*given, inputs.state(1), inputs.history(1, 0), None, None, None),)


GATED_DELTA_STEP = gpu.Operation(
    "gated delta step kernel / three kernels",
    "gated_delta_step",
    _error,
    _applies,
    run_kernel,
    run_kernels,
    _arguments,
)
