"""What is read from the disk gives a cold start's tokens; what goes wrong hits no request."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request, RequestOptions
from mlx_mtp.errors import UsageError
from mlx_mtp.prefix import directory as prefix_files
from mlx_mtp.prefix.disk import PrefixStore, open_store
from tests.cache.prefixes import FINGERPRINT, flush, keep
from tests.engine.cases import EOS, ROOM, SAMPLED, ask, check, driver, words
from tests.harness import Driver, greedy, request
from tests.tiny_models import FAMILIES

SYSTEM = 21
Start = Callable[..., Driver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers, or rather their likes, one after another on one directory."""
    stores: list[PrefixStore] = []

    def begin(model, **settings) -> Driver:
        for store in stores:
            store.close()
        stores.append(PrefixStore(tmp_path / "prefixes", FINGERPRINT, 1 << 30))
        return driver(model, store=stores[-1], **settings)

    yield begin
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.full) for f in FAMILIES[1:])]
)
def test_after_a_restart_it_is_warm_and_answers_as_if_cold(tiny_models, ties, start, family):
    """A conversation goes on, is asked again, and a branch leaves it; greedy and sampled."""
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

    # What was added after the restart is there after the next one, all at once, though memory has
    # room for about two of them: the others are read in their turns.
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
        # Want of memory doesn't touch the disk.
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
    """Where answers are exact; what the first start has written stays for others like it."""
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
    # In memory the cache went on; with room again, what is used again is written.
    assert run.reused("2") >= 32
    run.store._refused_until = 0.0
    last = request("last", [*prompt, *words(60, 9)], greedy(5, ignore_eos=True))
    ask(run, last)
    later = start(model)
    again = request("again", last.prompt_token_ids, greedy(5, ignore_eos=True))
    ask(later, again)
    check(later, model, ties, again)
    assert later.reused("again") == 49
