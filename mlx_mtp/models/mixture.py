"""An MLP between two norms; of a mixture of experts, the router and the sums are a launch each."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

from mlx_mtp.kernels import norms, router
from mlx_mtp.models.few_rows import FewRowsMixture, few, project
from mlx_mtp.world import summed, world


def add_mlp(
    x: mx.array, normed: mx.array, mlp: nn.Module, weight: mx.array, eps: float
) -> list[mx.array]:
    """x [N, H] plus an MLP of its norm; and that normed again, by the weight given."""
    width, rows = norms.Shape(x.shape[-1], eps), len(x)
    if few(x) and type(mlp) in (FewRowsMixture, Qwen3NextSparseMoeBlock):
        if rows * (mlp.top_k + 1) > router.MOST_PAIRS:
            halves = slice(rows // 2), slice(rows // 2, None)
            parts = [add_mlp(x[own], normed[own], mlp, weight, eps) for own in halves]
            return [mx.concatenate(list(pair)) for pair in zip(*parts)]
        kind = router.Router(mlp.num_experts, mlp.top_k, mlp.norm_topk_prob)
        if router.fits(kind, x.dtype):
            found, weights = _mixture(normed, mlp, kind)
            if world().size == 1:
                mixed = width._replace(chosen=mlp.top_k + 1)
                return norms.MIX_NORM(mixed, x, found, weights, weight)
            # Between what several ranks compute and a norm is a sum over them.
            part = norms.add_up(found, weights)
            return norms.ADD_NORM(width, x, summed(part), weight)
    return norms.ADD_NORM(width, x, summed(mlp(normed)), weight)


def _mixture(x: mx.array, mlp: nn.Module, kind: router.Router) -> tuple[mx.array, mx.array]:
    """What each token's experts give, [N * (K + 1), H], the shared one's last; their weights."""
    logits, gate = project(x, mlp.gate, mlp.shared_expert_gate)
    routes = router.launch(logits, gate, kind)
    if type(mlp) is FewRowsMixture:
        found = mlp.switch_mlp.ordered(x, mlp.shared_expert, routes.sorted, routes.order)
    else:
        routed = mlp.switch_mlp(x, routes.experts[:, :-1])
        found = mx.concatenate([routed, mlp.shared_expert(x)[:, None]], axis=1).flatten(0, 1)
    return found, routes.weights
