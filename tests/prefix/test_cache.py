"""Warm equals cold, with prefixes from the cache or, after a restart, from its disk.

The tokens are those of plain decoding, and faults of the cache fail no request.
"""

import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.request import Request, RequestOptions
from mlx_mtp.engine.step import InFlightStep
from mlx_mtp.errors import UsageError
from mlx_mtp.prefix import cache as prefix_module
from mlx_mtp.prefix import directory as prefix_files
from mlx_mtp.prefix.disk import PrefixStore, open_store
from mlx_mtp.prefix.radix_tree import PrefixTree
from mlx_mtp.prefix.segments import Segment
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from tests.support.cases import (
    EOS,
    ROOM,
    SAMPLED,
    RandomChunks,
    ask,
    check,
    check_head_cache,
    driver,
    words,
)
from tests.support.grammars import compiled
from tests.support.harness import Driver, Plain, Ties, greedy, plain, request
from tests.support.prefixes import FINGERPRINT, flush, keep, nodes
from tests.support.quick import diagonal, full
from tests.support.tiny_models import FAMILIES, VOCAB


@diagonal(family=FAMILIES, depth=(0, 3, "auto"), overlap=(True, False))
def test_a_conversation_goes_on(tiny_models, ties, family, depth, overlap):
    """Each turn reuses all up to the last answer's end; the last turn is repeated and edited."""
    model = tiny_models[family]
    warm = driver(model, depth, overlap=overlap)
    history = [*words(1, 21), EOS, *words(2, 9), EOS, 5]
    held = 0
    for turn in range(3):
        sampling = SAMPLED[turn] if turn else greedy(13, ignore_eos=True)
        asked = request(f"turn {turn}", history, sampling)
        ask(warm, asked)
        check(warm, model, ties, asked)
        answer = warm.tokens(asked.request_id)
        assert warm.reused(asked.request_id) == held, "the end of the last answer was not found"
        held = len(history) + len(answer) - 1
        history = [*history, *answer, EOS, *words(10 + turn, 7), EOS, 5]
    again = request("again", asked.prompt_token_ids, greedy(9))
    edited = request("edited", [*history[:31], *words(20, 12)], greedy(9))
    ask(warm, again, edited)
    check(warm, model, ties, again, edited)
    assert warm.reused("again") == len(asked.prompt_token_ids)
    assert 16 <= warm.reused("edited") <= 31


def test_grammars_and_penalties_on_a_cached_prompt(tiny_models, ties):
    """Answers equal plain decoding, and the choices of one prompt compute it only once."""
    model, prompt = tiny_models["qwen3_next"], words(8, 35)
    grammar = compiled(GrammarSpec("regex", "[a-z]{4,9}[0-9]+"))
    warm = driver(model, 2)
    ask(warm, request("before", prompt, greedy(3)))
    # An exact hit, and beside it a prompt that continues the cached one.
    constrained = request("grammar", prompt, greedy(9), grammar)
    longer = request("longer", [*prompt, 5, 6, 7], SAMPLED[3])
    ask(warm, constrained, longer)
    check(warm, model, ties, constrained, longer)
    assert [warm.reused(name) for name in ("grammar", "longer")] == [len(prompt)] * 2
    warm = driver(model, 2)
    sampling = [SamplingParams(max_tokens=9, temperature=1.0, seed=3, choice=i) for i in range(4)]
    wanted = [request(f"choice {i}", words(7, 50), s) for i, s in enumerate(sampling)]
    ask(warm, *wanted)
    check(warm, model, ties, *wanted)
    assert warm.core.scheduler.stats().prompt_tokens == 50


@pytest.mark.parametrize(("family", "depth"), [("qwen3_next", 3), ("qwen3_5", 0)])
def test_the_heads_own_cache_is_complete_behind_a_prefix(tiny_models, family, depth):
    """This includes the head's row at the end of the prefix, also of an exact hit."""
    model = tiny_models[family]
    warm = driver(model, depth)
    prompt = words(12, 37)
    ask(warm, request("before", prompt, greedy(6, ignore_eos=True)))
    # Where the texts part, the head's row depends on the next token, so each has its own.
    branch = [*prompt[:20], *words(14, 25)]
    ask(warm, request("parting", branch, greedy(6, ignore_eos=True)))
    for name, text in (
        ("branch", [*branch, 5, 6]),
        ("exact", prompt),
        ("longer", [*prompt, *words(13, 20)]),
        ("answer", [*prompt, *warm.tokens("before"), 5]),
    ):
        warm.add(request(name, text, greedy(30, ignore_eos=True)))
        while len(warm.tokens(name)) < 8:
            warm.step()
        assert warm.reused(name) >= len(prompt)
        check_head_cache(warm, model, name)


@pytest.mark.parametrize("bits", [4, full(8)])
def test_quantized_prefixes(demo_model, tmp_path, bits):
    """Quantized prefixes are smaller, found as before, good for drafts, and equal from the disk."""
    tokens = [int(t) for t in np.random.default_rng(4).integers(2, 4000, 100)]
    runs, sizes = [], []
    for name, quantization in (("plain", None), ("quantized", bits), ("quantized", bits)):
        with closing(PrefixStore(tmp_path / name, FINGERPRINT, 1 << 30)) as store:
            more = {"vocab_size": 4096, "prefill_step_size": 32}
            run = driver(demo_model, store=store, kv_cache_quantization=quantization, **more)
            if len(runs) < 2:
                # The prefix is saved in pieces, and split where "other" parts from "before".
                ask(run, request("first token", tokens[:1], greedy(1)))
                ask(run, request("before", tokens, greedy(20)))
                ask(run, request("other", [*tokens[:50], *tokens[:30]], greedy(20)))
                answer = run.tokens("before")
                assert run.reused("other") == 32
            ask(run, request("after", [*tokens, *answer, 7, 8], greedy(30)))
        assert run.reused("after") == (119 if len(runs) < 2 else 122)
        runs.append(run)
        sizes.append(sum(n.kv.nbytes for n in nodes(run.prefixes.tree)))
    # 64 values share a scale and a bias of 4 bytes each.
    assert sizes[1] / sizes[0] == pytest.approx(bits / 32 + 8 / 64 / 4, abs=0.01)
    accepted = [sum(o.num_accepted_tokens for o in run.outputs["after"]) for run in runs]
    assert accepted[1] > 0.6 * accepted[0]
    assert runs[2].tokens("after") == runs[1].tokens("after")


def test_what_goes_wrong_with_the_cache_hits_no_request(tiny_models, ties, monkeypatch, caplog):
    model = tiny_models["qwen3_next"]
    prompt = words(16, 40)

    def broken(*parts, **more):
        raise MemoryError("no room for a copy")

    for owner, name in (
        (prefix_module, "take_segment"),
        (prefix_module, "take_snapshot"),
        (Segment, "cut"),
        (PrefixTree, "insert"),
        (prefix_module, "restore"),
    ):
        warm = driver(model, 2)
        if not name.startswith("take"):
            ask(warm, request("before", prompt, greedy(9)))
        parted = prompt[:20] if name == "cut" else prompt
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            wanted = [request(f"{name} {i}", [*parted, *prompt, i], greedy(9)) for i in range(2)]
            ask(warm, *wanted)
        check(warm, model, ties, *wanted)
        if name.startswith("take"):
            assert len(warm.prefixes.tree) == 0
    assert [warm.reused(r.request_id) for r in wanted] == [0, 0]
    # Prefixes that could not be restored were dropped, and have been saved again.
    ask(warm, request("after", [*wanted[0].prompt_token_ids, 6], greedy(3)))
    assert warm.reused("after") == 81
    assert "could not be restored" in caplog.text


@pytest.mark.parametrize("where", ["read", "launch"])
def test_a_step_that_fails_saves_nothing(tiny_models, monkeypatch, where):
    """The next chunk, which is launched before the failed one is read, saves nothing either."""
    model = tiny_models["qwen3_5"]
    warm = driver(model, 2, min_gain=20)  # nothing is saved after the first chunk
    owner, name = (InFlightStep, "read") if where == "read" else (type(model), "hidden")
    original, calls = getattr(owner, name), []

    def failing(*parts):
        calls.append(parts)
        if len(calls) == 1:
            raise RuntimeError("the device went away")
        return original(*parts)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        ask(warm, request("lost", words(17, 60), greedy(5)))
    assert warm.reason("lost") == "error"
    assert where == "launch" or len(calls) > 1
    assert len(warm.prefixes.tree) == warm.prefixes.tree.nbytes == 0


def test_the_bytes_that_are_counted_are_those_that_are_held(tiny_models):
    """No entry keeps a batch's whole buffer alive, or that of the node it was split from."""
    warm = driver(tiny_models["qwen3_next"], 2, prefill_step_size=64)

    def held() -> int:
        warm.runner.batches.decoding = None
        gc.collect()
        mx.synchronize()
        return mx.get_active_memory()

    ask(warm, request("warm up", words(19, 60), greedy(5)))
    warm.prefixes.tree.clear()
    before = held()
    for number in range(5):
        text = [*words(20, 400 - 80 * number), *words(number + 30, 70)]
        ask(warm, request(f"r{number}", text, greedy(2, ignore_eos=True)))
    assert warm.prefixes.tree.nbytes > 1_500_000
    # mlx copies no slice that leaves out less than 16 KB of its buffer.
    assert held() - before == pytest.approx(warm.prefixes.tree.nbytes, rel=0.1)


SYSTEM = 21
Start = Callable[..., Driver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts drivers on one directory, one after another, as servers would."""
    stores: list[PrefixStore] = []

    def begin(model, **settings) -> Driver:
        for store in stores:
            store.close()
        stores.append(PrefixStore(tmp_path / "prefixes", FINGERPRINT, 1 << 30))
        return driver(model, store=stores[-1], **settings)

    yield begin
    for store in stores:
        store.close()


@pytest.mark.parametrize("family", [FAMILIES[0], *map(full, FAMILIES[1:])])
def test_after_a_restart_it_is_warm_and_answers_as_if_cold(tiny_models, ties, start, family):
    """A conversation is continued, repeated and branched; greedy and sampled."""
    model = tiny_models[family]
    history = [*words(1, SYSTEM - 1), EOS, *words(2, 30), EOS, 5]
    first = start(model)
    asked = request("first", history, greedy(13, ignore_eos=True))
    ask(
        first,
        asked,
        Request("salted", (*history, 9), greedy(2), options=RequestOptions(cache_salt="mine")),
    )
    told = first.tokens("first")

    second = start(model)
    assert len(second.prefixes.tree) == 0 == second.prefixes.tree.nbytes
    more = [*history, *told, EOS, *words(3, 9), EOS, 5]
    # The branch first: it parts in the middle of a file.
    wanted = [
        request("branch", [*history[:40], *words(4, 12)], SAMPLED[2]),
        request("goes on", more, greedy(9)),
        request("again", history, SAMPLED[1]),
        Request("mine", (*history, 9), greedy(3), options=RequestOptions(cache_salt="mine")),
        Request("other", (*history, 9), greedy(3), options=RequestOptions(cache_salt="other")),
    ]
    for each in wanted:
        ask(second, each)
    check(second, model, ties, *wanted)
    expected = [32, len(history) + len(told) - 1, len(history), len(history) + 1, 0]
    assert [second.reused(each.request_id) for each in wanted] == expected

    # Prefixes added after the restart are all found after the next one, although memory has room
    # for only about two of them: the others are read when they are needed.
    entries = [node.entry() for node in second.prefixes.tree._entries]
    room = max(sum(segment.nbytes for segment in entry) for entry in entries)
    third = start(model, prefix_cache_size=int(2.5 * room))
    for turn in range(2):
        later = [
            replace(each, request_id=f"{each.request_id} {turn}", sampling=SAMPLED[3])
            for each in wanted
        ]
        ask(third, *later)
        check(third, model, ties, *later)
        for each in later:
            assert third.reused(each.request_id) == len(each.prompt_token_ids)
        # Clearing the memory doesn't touch the disk.
        third.prefixes.clear()
        assert third.prefixes.tree.nbytes == 0


def test_other_settings_files_are_ignored_and_removed(demo_model, tmp_path):
    path = tmp_path / "own"
    base = EngineConfig(prefix_cache_size=ROOM)
    settings = [
        (base, "float32"),
        (replace(base, kv_cache_quantization=8), "float32"),
        (replace(base, prefill_step_size=64), "float32"),
        (base, "bfloat16"),
    ]
    for config, dtype in settings:
        with closing(open_store(demo_model, config, dtype, path, 1 << 30)) as store:
            assert store.stats()["num_files"] == 0
            keep(store, 1, 2)
            assert flush(store)
    with closing(open_store(demo_model, *settings[-1], path, 1 << 30)) as store:
        assert store.stats()["num_files"] == 2
    with pytest.raises(UsageError, match="prefix_cache_size is 0"):
        open_store(demo_model, EngineConfig(), "float32", path, 1 << 30)


def test_a_start_that_chose_other_operations_restores_nothing(tiny_models, tmp_path):
    """This holds for exact answers; prefixes of the first start stay for later starts like it."""
    model, prompt = tiny_models[FAMILIES[0]], words(1, 70)
    layer = model.causal_lm.model.layers[0].mlp
    kinds = type(layer), type("Other", (type(layer),), {})
    for exact, reused in ((True, [0, 0, 64, 64]), (False, [0, len(prompt)])):
        given = {"prefill_step_size": 64, "prefix_cache_size": ROOM, "exact": exact}
        folder = tmp_path / f"{exact}"
        for number, expected in enumerate(reused):
            layer.__class__ = kinds[number % 2]
            store = open_store(model, EngineConfig(2, **given), "float32", folder, 1 << 30)
            with closing(store):
                run = driver(model, store=store, **given)
                ask(run, request("r", prompt, greedy(2)))
                assert run.reused("r") == expected
                assert flush(store)
    layer.__class__ = kinds[0]


def test_a_full_disk_hits_no_request(tiny_models, ties, start, tmp_path, monkeypatch, caplog):
    model = tiny_models[FAMILIES[0]]
    run = start(model)
    prompt = words(50, 40)

    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(prefix_files.os, "write", full)
        wanted = [request(f"{i}", [*prompt, *words(51 + i, 9)], SAMPLED[i]) for i in range(3)]
        for each in wanted:
            ask(run, each)
    check(run, model, ties, *wanted)
    assert sum("No space left" in record.message for record in caplog.records) == 1
    # The cache continued in memory; with room again, prefixes that are used again are written.
    assert run.reused("2") >= 32
    run.store._refused_until = 0.0
    last = request("last", [*prompt, *words(60, 9)], greedy(5, ignore_eos=True))
    ask(run, last)
    later = start(model)
    again = request("again", last.prompt_token_ids, greedy(5, ignore_eos=True))
    ask(later, again)
    check(later, model, ties, again)
    assert later.reused("again") == 49


LONGEST = 150
TURNS = st.lists(
    st.fixed_dictionaries(
        {
            # The number of the earlier turn that it continues (0: none), and the share of that
            # turn's text that it keeps (None: all, and the answer).
            "parent": st.integers(0, 6),
            "kept": st.one_of(st.none(), st.none(), st.floats(0.0, 1.0)),
            # Number of tokens that it adds, and the text they are from; some are the same.
            "message": st.integers(0, 40),
            "text": st.integers(0, 2),
            "sampling": st.integers(0, 9),  # 5 and above: greedy
            "salt": st.sampled_from(["", "", "", "other"]),
            # Engine steps before the next turn, and what happens then.
            "steps": st.integers(0, 12),
            "then": st.sampled_from(["", "", "", "", "", "cancel", "clear"]),
        }
    ),
    min_size=2,
    max_size=8,
)
SHAPES = st.fixed_dictionaries(
    {
        "depth": st.sampled_from([0, 1, 2, 3, 5, "auto"]),
        "prefill_step_size": st.sampled_from([8, 16, 64]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "overlap": st.booleans(),
        "prefills": st.sampled_from([PrefillScheduler, RandomChunks]),
        "prefix_cache_size": st.sampled_from([60_000, 200_000, 1 << 26]),
    }
)


def text(number: int, count: int) -> list[int]:
    """Returns the beginning of one of a few texts; some of its tokens end a message."""
    return [int(t) for t in np.random.default_rng(number).integers(1, 40, count)]


def play(
    model, turns: list[dict], shape: dict, ties: Ties, store: PrefixStore | None, reference
) -> Driver:
    """Run the turns as they arrive, and compare every answer with plain decoding."""
    warm = driver(model, store=store, **shape)
    asked: list[Request] = []
    left: set[str] = set()
    for number, turn in enumerate(turns):
        history: list[int] = []
        if parent := turn["parent"] % (number + 1):
            before = asked[parent - 1]
            # Its answer can be incomplete.
            history = [*before.prompt_token_ids, *warm.tokens(before.request_id)]
        if turn["kept"] is not None:
            history = history[: int(turn["kept"] * len(history))]
        prompt = [*history, *text(turn["text"], turn["message"])][:LONGEST] or [5]
        kind = turn["sampling"]
        sampling = SAMPLED[kind] if kind < 5 else greedy(4 + kind)
        wanted = Request(
            f"turn {number}",
            tuple(prompt),
            sampling,
            options=RequestOptions(cache_salt=turn["salt"]),
        )
        asked.append(wanted)
        warm.add(wanted)
        for _ in range(turn["steps"]):
            warm.step()
        if turn["then"] == "cancel":
            warm.core.scheduler.cancel(wanted.request_id)
            left.add(wanted.request_id)
        elif turn["then"] == "clear":
            warm.prefixes.clear()
        assert warm.prefixes.tree.nbytes <= warm.prefixes.tree.limit
    warm.run()
    for wanted in asked:
        got = warm.tokens(wanted.request_id)
        told = reference(wanted.prompt_token_ids, wanted.sampling)
        if wanted.request_id in left and len(got) < len(told.tokens):
            told = type(told)(told.tokens[: len(got)], told.gaps)
        ties.check(wanted.request_id, got, told)
    warm.scheduler.schedule()
    assert not warm.prefixes.tree._pins
    return warm


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [3, full(500)])
def test_trees_of_conversations(tiny_models, count):
    """Half of the trees have a directory, and run again after a restart."""
    ties = Ties()
    queries, hits = [], []

    @settings(
        max_examples=count, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        turns=TURNS,
        shape=SHAPES,
        family=st.sampled_from(FAMILIES),
        max_bytes=st.sampled_from([0, 0, 300_000, 1 << 30]),
    )
    def check(turns: list[dict], shape: dict, family: str, max_bytes: int) -> None:
        model = tiny_models[family]

        @cache
        def reference(prompt: tuple[int, ...], sampling: SamplingParams) -> Plain:
            return plain(model, Request("plain", prompt, sampling), VOCAB, (EOS,))

        with TemporaryDirectory() as folder:
            for _ in range(2 if max_bytes else 1):
                size = max_bytes or 1
                with closing(PrefixStore(Path(folder) / "own", FINGERPRINT, size)) as store:
                    used = store if max_bytes else None
                    warm = play(model, turns, shape, ties, used, reference)
                    assert flush(store)
                    assert store.stats()["file_nbytes"] <= max_bytes
        queries.append(warm.reuse.num_queries)
        hits.append(warm.reuse.num_hits)

    check()
    share = sum(hits) / sum(queries)
    ties.report(f"{len(hits)} trees of conversations, {share:.0%} of their prompts from the cache")
    assert share > 0.05, "hardly anything was found, so hardly anything was tested"
