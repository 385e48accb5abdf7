"""The prefix cache on disk, as the engine uses it: what is read back gives the tokens of a cold
start, and whatever goes wrong there hits no request."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_mtp.cache import prefix_files
from mlx_mtp.cache.prefix_store import PrefixStore
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.build import build_engine, prefix_store
from mlx_mtp.engine.request import Request
from mlx_mtp.errors import UsageError
from tests.cache.prefixes import FINGERPRINT, PATIENCE
from tests.engine.cases import EOS, SAMPLED
from tests.engine.prefix_runs import ROOM, ask, check, driver, words
from tests.harness import Driver, greedy, request
from tests.tiny_models import FAMILIES

SYSTEM = 21
Start = Callable[..., Driver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers, or rather their likes, one after another on one directory."""
    stores: list[PrefixStore] = []

    def begin(model, mark: str = FINGERPRINT, max_bytes: int = 1 << 30, **settings) -> Driver:
        for store in stores:
            store.close()
        stores.append(PrefixStore(tmp_path / "prefixes", mark, max_bytes))
        return driver(model, store=stores[-1], **settings)

    yield begin
    for store in stores:
        store.close()


def files(folder: Path) -> list[Path]:
    return sorted((folder / "prefixes").glob("*.safetensors"))


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.full) for f in FAMILIES[1:])]
)
def test_after_a_restart_it_is_warm_and_answers_as_if_cold(tiny_models, ties, start, family):
    """A conversation goes on, is asked again, and a branch leaves it; greedy and sampled."""
    model = tiny_models[family]
    history = [*words(1, SYSTEM - 1), EOS, *words(2, 30), EOS, 5]
    first = start(model)
    asked = request("first", history, greedy(13, ignore_eos=True))
    ask(first, asked)
    told = first.tokens("first")

    second = start(model)
    assert len(second.prefixes.tree) == 0 == second.prefixes.tree.nbytes
    more = [*history, *told, EOS, *words(3, 9), EOS, 5]
    # The branch first: it parts within a node that is not in memory.
    wanted = [
        request("branch", [*history[:40], *words(4, 12)], SAMPLED[2]),
        request("goes on", more, greedy(9)),
        request("again", history, SAMPLED[1]),
    ]
    for each in wanted:
        ask(second, each)
    check(second, model, ties, *wanted)
    assert second.reused("goes on") == len(history) + len(told) - 1
    assert second.reused("again") == len(history)
    assert second.reused("branch") == 32

    # What was added after the restart is there after the next one, all at once.
    third = start(model)
    later = [request(f"{each.request_id}!", each.prompt_token_ids, SAMPLED[3]) for each in wanted]
    ask(third, *later)
    check(third, model, ties, *later)
    for each in later:
        assert third.reused(each.request_id) == len(each.prompt_token_ids)


def test_what_memory_has_no_room_for_is_read_back(tiny_models, ties, start):
    """Room for about two of six conversations: the others come from the disk, in their turns."""
    model = tiny_models[FAMILIES[0]]
    prompts = [words(10 + i, 40) for i in range(6)]
    probe = start(model)
    ask(probe, request("probe", prompts[0], greedy(4, ignore_eos=True)))
    size = probe.prefixes.tree.nbytes
    run = start(model, prefix_cache_size=int(2.5 * size), mark="e" * 64)
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            asked = request(f"{turn} {number}", prompt, greedy(4, ignore_eos=True))
            ask(run, asked)
            check(run, model, ties, asked)
            assert run.reused(asked.request_id) == (40 if turn else 0)
            assert run.prefixes.tree.nbytes <= run.prefixes.tree.limit
    # Want of memory, or the death of the engine's thread, doesn't touch the disk.
    run.prefixes.clear()
    assert run.prefixes.tree.nbytes == 0
    together = [request(f"all {i}", p, SAMPLED[i % 5]) for i, p in enumerate(prompts)]
    ask(run, *together)
    check(run, model, ties, *together)


def test_a_corrupt_file_shortens_what_is_found(tiny_models, ties, start, tmp_path):
    """Each file in turn is spoiled behind the server's back; the answer is right each time."""
    model = tiny_models[FAMILIES[0]]
    prompt = [*words(30, SYSTEM - 1), EOS, *words(31, 30)]
    ask(start(model), request("before", prompt, greedy(5, ignore_eos=True)))
    names = [file.name for file in files(tmp_path)]
    assert len(names) >= 6
    reused = []
    for number, name in enumerate(names):
        run = start(model)
        file = tmp_path / "prefixes" / name
        content = bytearray(file.read_bytes())
        content[-9] ^= 1
        file.write_bytes(content)
        asked = request(f"{number}", prompt, greedy(5, ignore_eos=True))
        ask(run, asked)
        check(run, model, ties, asked)
        reused.append(run.reused(asked.request_id))
        # It was computed, and is there again, if only in another file.
        again = start(model)
        later = request(f"{number} again", prompt, SAMPLED[number % 5])
        ask(again, later)
        check(again, model, ties, later)
        assert again.reused(later.request_id) == len(prompt)
    assert min(reused) == 0, "the first file of all was among them"
    assert sorted(reused)[len(reused) // 2] > 0, "a miss takes no more than what builds on it"


def test_other_settings_files_are_ignored_and_removed(demo_model, start, tmp_path):
    """The fingerprint tells quantization, prefill chunks, types and the head apart."""
    path = tmp_path / "own"
    base = EngineConfig(prefix_cache_size=ROOM)
    settings = [
        (base, "float32"),
        (EngineConfig(prefix_cache_size=ROOM, kv_cache_quantization=8), "float32"),
        (EngineConfig(prefix_cache_size=ROOM, kv_cache_quantization=4), "float32"),
        (EngineConfig(prefix_cache_size=ROOM, prefill_step_size=64), "float32"),
        (base, "bfloat16"),
    ]
    for config, dtype in settings:
        store = prefix_store(demo_model, config, dtype, path, 1 << 30)
        try:
            assert store.stats().num_nodes == 0
            run = Driver(demo_model, vocab_size=4096, config=config, store=store)
            run.store = store
            ask(run, request("a", words(40, 30), greedy(3)))
            assert run.reused("a") == 0
            assert store.stats().num_nodes > 0
        finally:
            store.close()
    again = prefix_store(demo_model, *settings[-1], path, 1 << 30)
    assert again.stats().num_nodes > 0
    again.close()
    with pytest.raises(UsageError, match="prefix_cache_size is 0"):
        prefix_store(demo_model, EngineConfig(), "float32", path, 1 << 30)


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
    assert files(tmp_path) == []
    assert sum("No space left" in record.message for record in caplog.records) == 1
    # In memory the cache went on; with room again, what is used again is written.
    assert run.reused("2") >= 32
    run.store._refused_until = 0.0
    last = request("last", [*prompt, *words(60, 9)], greedy(5, ignore_eos=True))
    ask(run, last)
    assert files(tmp_path)
    later = start(model)
    again = request("again", last.prompt_token_ids, greedy(5, ignore_eos=True))
    ask(later, again)
    check(later, model, ties, again)
    assert later.reused("again") == 49


def test_branches_share_files_and_salts_do_not_mix(tiny_models, ties, start, tmp_path):
    model = tiny_models[FAMILIES[0]]
    shared = words(70, 64)
    run = start(model)

    def disk() -> int:
        return sum(file.stat().st_size for file in files(tmp_path))

    ask(run, request("one", [*shared, *words(71, 8)], greedy(2, ignore_eos=True)))
    alone = disk()
    for number in range(4):
        prompt = [*shared, *words(72 + number, 8)]
        ask(run, request(f"branch {number}", prompt, greedy(2, ignore_eos=True)))
    assert disk() < 3 * alone
    salted = Request("salted", (*shared, 9), greedy(2), cache_salt="mine")
    ask(run, salted)
    assert run.reused("salted") == 0

    later = start(model)
    wanted = [
        Request("other", salted.prompt_token_ids, greedy(2), cache_salt="other"),
        Request("mine", salted.prompt_token_ids, greedy(2), cache_salt="mine"),
        request("none", [*shared, *words(73, 8)], greedy(2)),
    ]
    for each in wanted:
        ask(later, each)
    check(later, model, ties, *wanted)
    assert [later.reused(each.request_id) for each in wanted] == [0, 65, 72]


def test_when_the_disk_is_full_of_files_what_stays_is_whole(tiny_models, ties, start, tmp_path):
    """The least recently used goes; what stays has all that is before it."""
    model = tiny_models[FAMILIES[0]]
    probe = start(model)
    ask(probe, request("probe", words(80, 40), greedy(2, ignore_eos=True)))
    room = int(3.5 * probe.store.stats().nbytes)
    run = start(model, max_bytes=room, mark="e" * 64)
    prompts = [words(80 + i, 40) for i in range(8)]
    for number, prompt in enumerate(prompts):
        # The first is used again and again.
        for name, text in ((f"{number}", prompt), (f"{number} first", prompts[0])):
            ask(run, request(name, text, greedy(2, ignore_eos=True)))
        assert sum(file.stat().st_size for file in files(tmp_path)) <= room
    later = start(model, max_bytes=room, mark="e" * 64)
    wanted = [request(f"{i}", p, greedy(4, ignore_eos=True)) for i, p in enumerate(prompts)]
    for each in (wanted[0], *wanted[:0:-1]):
        ask(later, each)
    check(later, model, ties, *wanted)
    assert later.reused("0") == 40
    assert later.reused("7") == 40
    assert later.reused("1") == 0


def test_an_engine_that_stops_leaves_a_whole_directory(demo_model, tmp_path):
    """What its last answers left is written when `stop` returns, and the directory is free."""
    config = EngineConfig(num_draft_tokens=2, prefix_cache_size=ROOM)
    prompt, reused, num_written = words(90, 40), [], 0
    for name in ("first", "second"):
        store = prefix_store(demo_model, config, "float32", tmp_path / "own", 1 << 30)
        engine = build_engine(demo_model, config, 4096, (EOS,), store=store)
        done = threading.Event()

        def deliver(outputs, done=done):
            reused.extend(o.num_reused_tokens for o in outputs if o.token_ids)
            if any(o.finish_reason for o in outputs):
                done.set()

        engine.start(deliver)
        try:
            engine.submit(request(name, prompt, greedy(1, ignore_eos=True)))
            assert done.wait(PATIENCE)
        finally:
            assert engine.stop(PATIENCE)
        counted = engine.stats().prefix_cache
        num_written += counted.num_files_written
        assert counted.num_files == num_written >= 2
        assert counted.num_files_dropped == 0
    assert reused == [0, 40]


def test_the_death_of_the_engines_thread_leaves_the_disk_as_it_is(demo_model, tmp_path):
    config = EngineConfig(num_draft_tokens=2, prefix_cache_size=ROOM)
    store = prefix_store(demo_model, config, "float32", tmp_path / "own", 1 << 30)
    engine = build_engine(demo_model, config, 4096, (EOS,), store=store)
    reused, failures, done = [], [], threading.Semaphore(0)

    def deliver(outputs):
        reused.extend(o.num_reused_tokens for o in outputs if o.token_ids)
        failures.extend(o for o in outputs if o.error)
        if any(o.finish_reason for o in outputs):
            done.release()
        if any(o.request_id == "deadly" and not o.error for o in outputs):
            raise SystemError("killed by a test")

    engine.start(deliver)
    try:
        for name in ("before", "deadly", "after"):
            engine.submit(request(name, words(91, 40), greedy(2 if name == "deadly" else 1)))
            assert done.acquire(timeout=PATIENCE)
        assert engine.stats().num_restarts == 1
    finally:
        assert engine.stop(PATIENCE)
    assert reused[0] == 0
    assert reused[-1] == 40
