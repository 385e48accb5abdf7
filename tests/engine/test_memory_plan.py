"""The memory plan: computed before serving, refused with numbers, never below the real use."""

import gc
import re
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks import prompt_memory
from mlx_mtp.build import build_engine, plan_for
from mlx_mtp.cache.specs import AttentionSpec, CacheMemory, GatedDeltaSpec, MLPSpec
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import memory
from mlx_mtp.engine.memory import Footprint, MemoryPlan, footprint, plan_memory
from mlx_mtp.engine.request import Request
from mlx_mtp.errors import ContextLengthError, UsageError
from mlx_mtp.flags import byte_size
from mlx_mtp.kernels.gdn_types import QWEN3_NEXT_80B
from mlx_mtp.machine import MOST_TEXT_BYTES, MemoryLimit
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from tests.support.harness import greedy
from tests.support.tiny_models import Layout, write_checkpoint

GB = 10**9
# Qwen3-Next-80B-A3B: 24 KB of KV per token and 75 MB of states per row.
EXPERTS = MLPSpec(2048, 11 * 512, num_experts=512, experts_per_token=10)
ATTENTION = AttentionSpec(EXPERTS, heads=16, kv_heads=2, head_dim=256)
LINEAR = GatedDeltaSpec(EXPERTS, QWEN3_NEXT_80B)
LARGE = Footprint(
    weights=45 * GB,
    head=GB,
    caches=CacheMemory((LINEAR, LINEAR, LINEAR, ATTENTION) * 12, has_head=True, itemsize=2),
    depth=8,
    vocab_size=151_936,
)


def plan(nbytes: int, shape: Footprint = LARGE, **more: int | None) -> MemoryPlan:
    given = {"allowed": 262_144, "max_model_len": None, "prefill_step_size": 512} | more
    return plan_memory(shape, MemoryLimit(nbytes, "a test"), **given)


def test_on_a_gpu_with_room_chunks_of_prompts_may_be_longer(monkeypatch):
    assert plan(500 * GB, longer_steps=True).prefill_step_size == 512
    monkeypatch.setattr(memory, "backend", lambda: "metal")
    steps = []
    for nbytes in (54 * GB, 100 * GB, 500 * GB):
        found, usual = (plan(nbytes, longer_steps=longer) for longer in (True, False))
        assert found.max_model_len == usual.max_model_len
        assert found.chunk == found.footprint.chunk_bytes(
            found.prefill_step_size, found.max_model_len
        )
        assert found.rows >= max(
            usual.rows * 7 // 8, found.footprint.row_bytes(found.max_model_len)
        )
        assert usual.prefill_step_size == 512
        steps.append(found.prefill_step_size)
    assert steps == [512, 1024, 2048]


def test_a_large_model_on_large_machines():
    """The plan gives a large machine the whole context, and a share to the prefix cache."""
    assert LARGE.caches.kv_per_token == 12 * 2 * 2 * 256 * 2
    assert LARGE.caches.states["recurrent state (float32)"] == 36 * 32 * 128 * 128 * 4
    assert LARGE.caches.states["convolution"] == 36 * 3 * 8192 * 2
    found = plan(110 * GB)
    assert (found.max_model_len, found.reduced) == (262_144, False)
    assert found.rows + found.chunk + 46 * GB + MOST_TEXT_BYTES == 110 * GB
    assert found.num_rows(262_144, 32) < found.num_rows(4096, 32) == 32
    text = "\n".join(found.lines(32))
    assert "110.0 GB (a test): weights 45.0 GB, head 1.0 GB" in text
    for left, share in ((16 * GB, 4 * GB), (64 * GB, 8 * GB)):
        found = plan(46 * GB + MOST_TEXT_BYTES + left, prefix_cache=None)
        assert found.prefix_cache == share
        assert found.rows + found.chunk == left - share


def test_rows_are_counted_each_by_its_own_length():
    found = plan(60 * GB)
    text = found.rows_at_once(32)
    long, beside = (found.num_rows(100_000, 32), found.num_rows(8000, 32, beside=100_000))
    assert text.endswith(f" or {long} of 100,000 or 1 of 100,000 and {beside} of 8,000")
    assert beside > 0
    assert found.usage([100_000, *[8000] * beside]) <= 1
    assert found.usage([100_000, *[8000] * (beside + 1)]) > 1
    # A row takes its KV, and not much more (logits and scores).
    own = 100_000 * LARGE.caches.kv(256) // 256
    assert own < LARGE.row_bytes(100_000) < 1.3 * own + 10**9


def test_the_context_is_cut_to_what_one_row_has_memory_for():
    found = plan(54 * GB)
    assert found.reduced
    assert 4096 < found.max_model_len < 262_144
    assert found.num_rows(found.max_model_len, 32) == 1
    assert found.usage([found.max_model_len + 100]) > 1
    assert plan(54 * GB, max_model_len=found.max_model_len) == replace(found, reduced=False)
    assert "less than the model allows" in found.lines(32)[1]
    assert plan(54 * GB, prefill_step_size=64).max_model_len > found.max_model_len
    assert plan(54 * GB, prefix_cache=GB).max_model_len < found.max_model_len


@pytest.mark.parametrize(
    ("limit", "given", "told"),
    [
        (
            54 * GB,
            {"max_model_len": 262_144},
            r"262,144 tokens needs \d+\.\d GB\. Of 54\.0 GB .* 46\.0 GB",
        ),
        (
            54 * GB,
            {"max_model_len": 262_144, "prefix_cache": 2 * GB},
            r"the prefix cache 2\.0 GB\.",
        ),
        (40 * GB, {}, r"Of 40\.0 GB \(a test\) the weights take 46\.0 GB.*`mlx-mtp models`"),
        (46 * GB + MOST_TEXT_BYTES + 10**6, {"prefix_cache": None}, "512 tokens needs"),
        (60 * GB, {"prefix_cache": 14 * GB}, "512 tokens needs"),
        (52 * GB, {"max_model_len": 80_000, "prefix_cache": None}, "80,000 tokens needs"),
    ],
)
def test_what_does_not_fit_is_refused_with_flags_each_of_which_would_do(limit, given, told):
    with pytest.raises(UsageError, match=told) as caught:
        plan(limit, **given)
    advice = dict(re.findall(r"--([a-z-]+) ([\d.]+[MG]?B?)", str(caught.value)))
    assert "memory-limit" in advice
    assert ("max-model-len" in advice) == (given.get("max_model_len") is not None)
    names = {"max-model-len": "max_model_len", "prefix-cache-size": "prefix_cache"}
    for name, value in advice.items():
        if name == "memory-limit":
            plan(byte_size(value), **given)
        else:
            plan(limit, **given | {names.get(name, "prefill_step_size"): byte_size(value)})


def test_the_plan_is_made_before_a_weight_is_read_and_counts_them_all(demo_model):
    gc.collect()  # Else leftovers of earlier tests could be freed during the test.
    gc.disable()
    try:
        before = mx.get_active_memory()
        model = load_model(BUNDLED_MODEL, enable_mtp=True, lazy=True)
        found = footprint(model, 8)
        assert mx.get_active_memory() < before + 2**20
        model.load_weights()
        assert mx.get_active_memory() > before + found.weights + found.head - 2**20
    finally:
        gc.enable()
    loaded = sum(value.nbytes for _, value in tree_flatten(demo_model.model.parameters()))
    assert found.weights + found.head == loaded
    assert footprint(model, 3, num_draft_ids=100).head == found.head + 100 * 256 * 4
    plain = footprint(model.without_head(), 3, num_draft_ids=100)
    assert (plain.weights, plain.head) == (loaded, 0)


def test_a_request_that_can_never_fit_is_refused_with_both_numbers(demo_model):
    config = EngineConfig(num_draft_tokens=1)
    found = plan_for(demo_model, config, MemoryLimit(200 * 10**6, "a test"))
    assert found.reduced
    engine = build_engine(demo_model, config, demo_model.vocab_size, (), memory=found)
    limit = found.max_model_len
    assert engine.info.max_model_len == limit < 65_536
    with pytest.raises(ContextLengthError, match=f"{limit} tokens > {limit - 1} maximum"):
        engine.submit(Request("a", (1,) * limit, greedy(1)))


def test_no_more_is_used_than_was_planned(tmp_path):
    """Prefill, join and growth of real rows stay within the plan, and use a fifth of it or more."""
    write_checkpoint(tmp_path, Layout("qwen3_5"))
    found = footprint(load_model(tmp_path, enable_mtp=True), prompt_memory.DEPTH)
    tokens, step = 1500, 256
    chunk = found.chunk_bytes(step, tokens)
    longest = tokens + prompt_memory.ANSWER
    short = prompt_memory.SHORT_PROMPT + prompt_memory.SHORT_ANSWER
    for beside in (0, 4):
        used = prompt_memory.measure_apart(tmp_path, tokens, beside, step)
        rows = sum(map(found.row_bytes, [longest, *[short] * beside]))
        assert used.prefill <= rows + chunk
        assert used.joined <= rows
        assert used.prefill > (found.row_bytes(longest) + chunk) / 5
