"""A layer's compiled parts compute what they do uncompiled."""

import mlx.core as mx
import pytest

from mlx_mtp.kernels import gpu
from mlx_mtp.models import layers, shared
from mlx_mtp.models.loader import load_model
from tests.tiny_models import FAMILIES, VOCAB, Layout, write_checkpoint


# A compiler's run for each fused operation takes its time.
@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.full) for each in FAMILIES[1:])]
)
def test_compiled_layers_agree(tmp_path, monkeypatch, family):
    write_checkpoint(tmp_path, Layout(family, seed=7))
    model = load_model(tmp_path, enable_mtp=False)
    compiled = []
    compile_part = mx.compile
    monkeypatch.setattr(mx, "compile", lambda part: compiled.append(part) or compile_part(part))
    monkeypatch.setattr(shared, "_compiled", {})

    def logits(backend):
        monkeypatch.setattr(layers, "backend", lambda: backend)
        cache, found = model.make_cache(2), []
        for lengths, kept in (
            *(([3, 2], [3, 2]), ([1, 1], [1, 1]), ([1, 4], None), ([3, 3], None)),
            *(([1, 1], [1, 1]), ([2, 1], None), ([1, 1], [1, 0])),
        ):
            cache.reserve([24, 24])
            packing = cache.begin(lengths, kept and mx.array(kept))
            tokens = mx.arange(packing.num_tokens) * 7 % VOCAB
            found.append(model.logits(model.hidden(tokens, cache)))
            cache.commit(mx.array(kept or [1, lengths[1] - 1]))
        other = model.make_cache(1)  # of a prompt beside them
        other.reserve([150])
        both = cache.begin([2, 3]).num_tokens + other.begin([150], mx.array([150])).num_tokens
        found.append(model.logits(model.hidden(mx.arange(both) * 7 % VOCAB, cache, other)))
        return mx.concatenate(found)

    plain = logits(None)
    assert not compiled
    assert mx.allclose(logits("cuda"), plain, rtol=1e-4, atol=1e-5)
    assert len(compiled) == 3, "layers of a kind share what they are compiled to"
    layer = model.causal_lm.model.layers[0]
    layer.post_attention_layernorm.eps *= 2
    shared.compiled(layer, "recur")
    assert len(compiled) == 4, "one that differs in a number does not"
    layer.post_attention_layernorm.eps /= 2
    monkeypatch.setattr(shared, "_MOST_TRACES", 2)
    assert mx.array_equal(logits("cuda"), logits("cuda")) and len(compiled) > 4, "traced anew"
    assert mx.allclose(logits("cuda"), plain, rtol=1e-4, atol=1e-5)


def test_a_step_and_a_prompt_of_as_many_tokens_are_not_traced_as_one(tmp_path, monkeypatch):
    """Products of 65 to 128 tokens, and of more in a step, depend on which it is."""
    write_checkpoint(tmp_path, Layout(FAMILIES[0], seed=7))
    model = load_model(tmp_path, enable_mtp=False)
    traced, add = [], layers.add_mlp
    monkeypatch.setattr(layers, "backend", lambda: "cuda")
    monkeypatch.setattr(layers, "add_mlp", lambda *a: traced.append(gpu.few(len(a[0]))) or add(*a))
    monkeypatch.setattr(shared, "_compiled", {})
    for rows, length, kinds in ((16, 6, {True}), (1, 96, {False}), (16, 6, ()), (1, 96, ())):
        traced.clear()
        cache = model.make_cache(rows)
        cache.reserve([length] * rows)
        tokens = mx.arange(cache.begin([length] * rows, mx.full(rows, length)).num_tokens)
        mx.eval(model.hidden(tokens % VOCAB, cache))
        assert {*traced} == {*kinds} and len(traced) == 2 * len(kinds), "one for each kind of layer"
