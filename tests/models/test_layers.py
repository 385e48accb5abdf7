"""A layer's compiled parts, and its joined form, give the results of the uncompiled layer."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.kernels import cpu, gpu
from mlx_mtp.models import compiled as shared
from mlx_mtp.models import layers
from mlx_mtp.models import model as model_module
from mlx_mtp.models.gemm import exact
from mlx_mtp.models.joined import JoinedLayer
from mlx_mtp.models.loader import load_model
from tests.support.tiny_models import FAMILIES, VOCAB, Layout, write_checkpoint


def as_on(monkeypatch, backend):
    """Run layers as on a GPU, with kernels for the CPU."""
    for module in (layers, model_module):
        monkeypatch.setattr(module, "backend", lambda: backend)


def compiled_model(path, monkeypatch):
    """Returns a tiny model whose layers are compiled as on a GPU; none has been compiled yet."""
    write_checkpoint(path, Layout(FAMILIES[0], seed=7))
    as_on(monkeypatch, "cuda")
    monkeypatch.setattr(shared, "_compiled", {})
    return load_model(path, enable_mtp=False)


# Compiling each fused operation takes time.
@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.full) for each in FAMILIES[1:])]
)
def test_compiled_and_joined_layers_agree(tmp_path, monkeypatch, family):
    write_checkpoint(tmp_path, Layout(family, seed=7, num_hidden_layers=6))
    model = load_model(tmp_path, enable_mtp=False)
    compiled = []
    compile_part = mx.compile
    monkeypatch.setattr(mx, "compile", lambda part: compiled.append(part) or compile_part(part))
    monkeypatch.setattr(shared, "_compiled", {})

    def logits(backend, joined=False):
        as_on(monkeypatch, backend)
        for layer in model.causal_lm.model.layers:
            layer.__dict__["_joined"] = JoinedLayer(layer) if joined else None
        cache, found = model.make_cache(2), []
        for lengths, kept in (
            *(([3, 2], [3, 2]), ([1, 1], [1, 1]), ([1, 4], None), ([3, 3], None)),
            *(([1, 1], [1, 1]), ([2, 1], None), ([1, 1], [1, 0])),
        ):
            cache.reserve([24, 24])
            packing = cache.begin_window(lengths, kept and mx.array(kept))
            tokens = mx.arange(packing.num_tokens) * 7 % VOCAB
            every = model.logits(model.hidden(tokens, cache))
            # The logits of a row that keeps nothing are meaningless.
            found.append(every if 0 not in (kept or ()) else every[: kept.index(0)])
            cache.commit(mx.array(kept or [1, lengths[1] - 1]))
        other = model.make_cache(1)  # of a prompt beside the rows
        other.reserve([150])
        both = (
            cache.begin_window([2, 3]).num_tokens
            + other.begin_window([150], mx.array([150])).num_tokens
        )
        found.append(model.logits(model.hidden(mx.arange(both) * 7 % VOCAB, cache, other)))
        return mx.concatenate(found)

    plain = logits(None)
    assert not compiled
    assert mx.allclose(logits(None, joined=True), plain, rtol=1e-4, atol=1e-4)
    compiled.clear()
    assert mx.allclose(logits("cuda"), plain, rtol=1e-4, atol=1e-5)
    spans = model.family.spans(model.model)
    kinds = len(shared._compiled)
    assert len(compiled) == 2 * kinds < 2 * len(spans), "spans of a kind share it, twice"
    span = copy.copy(spans[0])
    shared.compiled(span, "run")
    assert len(shared._compiled) == kinds
    span.layer0.post_attention_layernorm.eps *= 2
    shared.compiled(span, "run")
    assert len(shared._compiled) == kinds + 1, "one that differs in a number does not"
    span.layer0.post_attention_layernorm.eps /= 2
    monkeypatch.setattr(shared, "_MOST_TRACES", dict.fromkeys(shared._MOST_TRACES, 2))
    monkeypatch.setattr(shared, "_compiled", {})
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "backend", lambda: "cuda")
        with exact.batch_invariant(model.model, model.dtype):
            others = model.family.spans(model.model)
    assert len({id(each) for each in (spans, others, model.family.spans(model.model))}) == 3, (
        "routes have changed"
    )
    compiled.clear()
    assert mx.array_equal(logits("cuda"), logits("cuda"))
    assert len(compiled) > 2 * kinds, "traced anew"
    assert mx.allclose(logits("cuda"), plain, rtol=1e-4, atol=1e-5)


def test_a_prompt_of_another_length_compiles_no_kernel(tmp_path, monkeypatch):
    """mlx writes constants of fused operations into kernels' source, so none can be a length."""
    model = compiled_model(tmp_path, monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where mlx keeps kernels for a CPU

    def new_kernels(rows, length):
        before = {*tmp_path.rglob("*.so")}
        cache = model.make_cache(rows)
        cache.reserve([2 * length] * rows)
        for _ in range(2):
            count = cache.begin_window([length] * rows, mx.full(rows, length)).num_tokens
            mx.eval(model.hidden(mx.arange(count) % VOCAB, cache))
            cache.commit(mx.full(rows, length))
        return {*tmp_path.rglob("*.so")} - before

    mx.eval(mx.compile(lambda x: mx.exp(x) * 7919 + 31)(mx.ones(3)))
    assert [*tmp_path.rglob("*.so")]
    for rows in (1, 2):
        new_kernels(rows, 150)
        assert not new_kernels(rows, 171)


def test_a_step_and_a_prompt_of_as_many_tokens_are_not_traced_as_one(tmp_path, monkeypatch):
    """Products of more than 64 tokens are computed in other ways in a step and in a prompt."""
    model = compiled_model(tmp_path, monkeypatch)
    traced, add = [], layers.add_mlp
    monkeypatch.setattr(layers, "add_mlp", lambda *a: traced.append(gpu.few(len(a[0]))) or add(*a))
    monkeypatch.setitem(shared._MOST_TRACES, False, 1)
    step, prompt = (16, 6), (1, 96)
    cases = [(step, {True}), (prompt, {False}), (step, ()), (prompt, ())]
    # Many lengths of prompts replace old traces of prompts, but none of a step.
    cases += [((1, 97), {False}), ((1, 98), {False}), (prompt, {False}), (step, ())]
    for (rows, length), kinds in cases:
        traced.clear()
        cache = model.make_cache(rows)
        cache.reserve([length] * rows)
        tokens = mx.arange(cache.begin_window([length] * rows, mx.full(rows, length)).num_tokens)
        mx.eval(model.hidden(tokens % VOCAB, cache))
        assert {*traced} == {*kinds} and len(traced) >= 2 * len(kinds), "one for each kind of layer"


def test_engines_of_one_process_trace_one_after_the_other(tmp_path, monkeypatch):
    """Engines on several threads share the compiled layers, so only one traces at a time."""
    model = compiled_model(tmp_path, monkeypatch)
    inside, add = [], layers.add_mlp

    def slow(*given):
        inside.append(threading.get_ident())
        time.sleep(0.02)
        assert inside.pop() == threading.get_ident() and not inside
        return add(*given)

    def run(length):
        with mx.stream(mx.new_thread_local_stream(mx.cpu)):
            cache = model.make_cache(1)
            cache.reserve([length])
            cache.begin_window([length], mx.array([length]))
            mx.eval(model.hidden(mx.arange(length), cache))

    mx.eval(model.model.parameters())
    monkeypatch.setattr(layers, "add_mlp", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(3, 11)))


@pytest.mark.parametrize("shape", [(3, 256), (31, 4, 64), (40, 256), (100, 4, 64)])
def test_both_forms_of_a_norm_on_a_cpu_are_mlxs(shape):
    """Inputs of at least 8,192 numbers take the second form."""
    x, weight = mx.random.normal(shape, key=mx.random.key(2)), mx.random.normal(shape[1:])
    expected = mx.fast.rms_norm(x, None, 1e-6) * weight
    assert mx.allclose(cpu.rms_norm(x, weight, 1e-6), expected, rtol=1e-5, atol=1e-6)


def test_a_product_in_blocks_is_the_product():
    layer = nn.Linear(64, 512, bias=False)
    assert cpu.BlockedLinear.serves(layer)
    blocked = copy.copy(layer)
    blocked.__class__ = cpu.BlockedLinear
    for _ in range(2):
        for shape in ((0, 64), (3, 64), (2, 1, 64), (2, 3, 64)):
            x = mx.random.normal(shape)
            assert blocked(x).shape == layer(x).shape
            assert mx.allclose(blocked(x), layer(x), rtol=1e-5, atol=1e-5)
        # As `DraftVocabulary` replaces the weight of a copy.
        blocked = copy.copy(blocked)
        layer.weight = blocked.weight = layer.weight[256:]


@pytest.mark.parametrize("length", [1, gpu.LONGEST_WINDOW, 70])
def test_a_pass_is_launched_in_parts(tmp_path, monkeypatch, length):
    """On a CPU after each layer; on a GPU a prompt after each span, and a step as a whole."""
    model = compiled_model(tmp_path, monkeypatch)
    launched, launch = [], mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: launched.append(len(a)) or launch(*a))
    for backend in (None, "cuda"):
        as_on(monkeypatch, backend)
        launched.clear()
        cache = model.make_cache(1)
        cache.reserve([length])
        cache.begin_window([length], mx.array([length]))
        mx.eval(model.hidden(mx.arange(length) % VOCAB, cache))
        on_gpu = len(model.family.spans(model.model)) if length > gpu.LONGEST_WINDOW else 0
        assert len(launched) == (on_gpu if backend else len(model.causal_lm.model.layers))


@pytest.mark.parametrize("backend", [None, "metal", "cuda"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_arrays_are_launched_early_on_a_cpu_or_where_a_gpu_gains(monkeypatch, backend, on_gpu):
    launched = []
    monkeypatch.setattr(gpu, "backend", lambda: backend)
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: launched.extend(arrays))
    array = mx.zeros(1)
    gpu.launch_early(array, on_gpu=on_gpu)
    assert launched == ([array] if on_gpu or backend is None else [])
