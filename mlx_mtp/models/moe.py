"""An MLP or mixture of experts between two norms; the router is one launch, as are the sums."""

import functools

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

from mlx_mtp.distributed import all_reduce, world
from mlx_mtp.kernels import norms, residual, topk
from mlx_mtp.models.gemm.routes import experts_in_order, is_decode_sized, project, served


def add_mlp(
    x: mx.array, attended: mx.array, normed: mx.array, mlp: nn.Module, weight: mx.array, eps: float
) -> list[mx.array]:
    """Returns x [N, H] plus attention's and the MLP's outputs, and this sum normed with `weight`.

    `attended` is attention's output, and `normed`, the norm of x plus `attended`, the MLP's input.
    """
    width, rows = norms.NormShape(x.shape[-1], eps), len(x)
    if type(mlp) is Qwen3NextSparseMoeBlock:
        kind = topk.Router(mlp.num_experts, mlp.top_k, mlp.norm_topk_prob)
        if is_decode_sized(x) and rows * (mlp.top_k + 1) > topk.MOST_PAIRS:
            halves = slice(rows // 2), slice(rows // 2, None)
            parts = [
                add_mlp(x[half], attended[half], normed[half], mlp, weight, eps) for half in halves
            ]
            return [mx.concatenate(list(pair)) for pair in zip(*parts)]
        if is_decode_sized(x) and topk.ROUTER.works(kind, x.dtype):
            outputs, choice = _mixture(normed, mlp, kind)
            if world().size == 1:
                mixed = width._replace(chosen=mlp.top_k + 1)
                return residual.ADD_MIX_NORM(mixed, x, attended, outputs, choice.pairs, weight)
            # The outputs are summed over ranks before the norm.
            part = residual.add_up(outputs, choice.weights)
            return residual.ADD_NORM(width, x, attended, all_reduce(part), weight)
        if rows and world().size == 1 and topk.ROUTER.works(kind, x.dtype):
            return _add_to_prompt(x, attended, normed, mlp, kind, weight, eps)
    return residual.ADD_NORM(width, x, attended, all_reduce(mlp(normed)), weight)


def _add_to_prompt(
    x: mx.array,
    attended: mx.array,
    normed: mx.array,
    mlp: nn.Module,
    kind: topk.Router,
    weight: mx.array,
    eps: float,
) -> list[mx.array]:
    """As `add_mlp`, for a prompt: the shared expert is computed densely, for all tokens."""
    gates = mlp.gate(normed), mlp.shared_expert_gate(normed)
    choice = topk.choose_experts(*gates, kind)
    weights = choice.weights
    routed = mlp.switch_mlp(normed, choice.experts[:, :-1]).flatten(0, 1)
    added = _add_share(x, attended, weights[:, -1:], mlp.shared_expert(normed))
    shape = norms.NormShape(x.shape[-1], eps, chosen=mlp.top_k)
    return residual.MIX_NORM(shape, added, routed, weights[:, :-1], weight)


@functools.partial(mx.compile, shapeless=True)
def _add_share(x: mx.array, attended: mx.array, share: mx.array, y: mx.array) -> mx.array:
    stream = (x + attended).astype(mx.float32)
    return stream + share * y  # not rounded until the routed experts are added


def _mixture(x: mx.array, mlp: nn.Module, kind: topk.Router) -> tuple[mx.array, topk.ExpertChoice]:
    """Returns the experts' outputs [N * (K + 1), H], of each token the shared one's last."""
    gates = project(x, mlp.gate, mlp.shared_expert_gate)
    logits, gate = gates.views()
    choice = topk.run_kernel(logits, gate, kind)
    if getattr(mlp, "joins_shared", False) and served(x, mlp.switch_mlp):
        outputs = experts_in_order(mlp.switch_mlp, x, mlp.shared_expert, choice.pairs)
    else:
        routed = mlp.switch_mlp(x, choice.experts[:, :-1])
        outputs = mx.concatenate([routed, mlp.shared_expert(x)[:, None]], axis=1).flatten(0, 1)
    return outputs, choice
