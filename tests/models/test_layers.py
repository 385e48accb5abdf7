"""A layer's compiled parts compute what they do uncompiled."""

import mlx.core as mx
import pytest

from mlx_mtp.models import layers
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

    def logits(backend):
        monkeypatch.setattr(layers, "backend", lambda: backend)
        cache, found = model.make_cache(2), []
        for lengths in ([3, 2], [1, 1], [1, 4], [1, 1]):
            cache.reserve([16, 16])
            packing = cache.begin(lengths, mx.array(lengths))
            tokens = mx.arange(packing.num_tokens) * 7 % VOCAB
            found.append(model.logits(model.hidden(tokens, cache)))
            cache.commit(mx.array(lengths))
        return mx.concatenate(found)

    plain = logits(None)
    assert not compiled
    assert mx.allclose(logits("cuda"), plain, rtol=1e-4, atol=1e-5)
    assert len(compiled) == 2 * len(model.layer_specs)
