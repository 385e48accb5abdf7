"""An engine on its thread, while a request waits for the disk and others continue."""

import threading
import time
from pathlib import Path

import pytest

from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.prefix import disk as prefix_store
from mlx_mtp.prefix.disk import PrefixStore
from tests.engine.test_engine import Client, fail_next_turn
from tests.support.cases import EOS, words
from tests.support.harness import greedy, plain, request
from tests.support.prefixes import FINGERPRINT, PATIENCE
from tests.support.tiny_models import FAMILIES, VOCAB
from tests.support.waiting import wait_until

PROMPT = words(1, 70)
CONFIG = EngineConfig(num_draft_tokens=2, prefix_cache_size=64 << 20, prefill_step_size=32)


class SlowDisk(PrefixStore):
    """A store whose reads wait until `go_on` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FINGERPRINT, 1 << 30)
        self.began, self.go_on = threading.Event(), threading.Event()
        self.close_seconds = PATIENCE

    def _read(self, files):
        self.began.set()
        assert self.go_on.wait(2 * PATIENCE)
        super()._read(files)

    def close(self, seconds: float = 0.0) -> None:
        super().close(self.close_seconds)


@pytest.fixture
def begin(tiny_models, tmp_path, monkeypatch):
    """A function that starts an engine on a directory that has PROMPT's prefix."""
    # Reads wait for the test, which can be slow on a busy machine.
    monkeypatch.setattr(prefix_store, "READ_SECONDS", 10 * PATIENCE)
    made: list[tuple[Client, SlowDisk]] = []

    def start() -> tuple[Client, SlowDisk]:
        disk = SlowDisk(tmp_path / "prefixes")
        model = tiny_models[FAMILIES[0]]
        engine = build_engine(model, CONFIG, VOCAB, (EOS,), store=disk)
        made.append((Client(engine), disk))
        return made[-1]

    first, disk = start()
    disk.go_on.set()
    first.engine.submit(request("first", PROMPT, greedy(1, ignore_eos=True)))
    first.wait("first")
    assert first.engine.stop(PATIENCE)
    counted = first.engine.stats().prefix_cache
    assert counted.num_files == counted.num_files_written >= 2
    yield start
    for served, disk in made:
        disk.go_on.set()
        assert served.engine.stop(PATIENCE)


def reused(served: Client, name: str) -> int:
    return sum(o.num_reused_tokens for o in served.outputs[name])


def test_others_go_on_while_a_prefix_is_read_and_it_is_right_when_it_comes(begin, tiny_models):
    served, disk = begin()
    stream = request("stream", [7, 8, 9], greedy(200, ignore_eos=True))
    wants = request("wants", [*PROMPT, 5], greedy(12, ignore_eos=True))
    with served.held_at(3, stream):
        served.engine.submit(wants)
    assert disk.began.wait(PATIENCE)
    # From now on the engine works while the disk does not answer.
    served.wait_for_tokens("stream", min(len(served.tokens("stream")) + 30, 200))
    late = request("late", [11, 12], greedy(5, ignore_eos=True))
    served.engine.submit(late)
    served.wait("late")
    assert served.tokens("wants") == []
    assert served.engine.stats().num_requests_waiting == 1
    disk.go_on.set()
    served.wait("wants", "stream")
    assert reused(served, "wants") == len(PROMPT)
    for each in (stream, wants, late):
        expected = plain(tiny_models[FAMILIES[0]], each, VOCAB).tokens
        assert tuple(served.tokens(each.request_id)) == expected


def test_with_nothing_else_to_do_the_engine_sleeps_and_is_well(begin, monkeypatch):
    served, disk = begin()
    steps, original = [], EngineCore.step

    def counted(self):
        steps.append(time.monotonic())
        return original(self)

    monkeypatch.setattr(EngineCore, "step", counted)
    served.engine._heartbeat._hang_seconds = 0.2
    names = ("one", "two")
    for name in names:
        served.engine.submit(request(name, [*PROMPT, 5], greedy(3, ignore_eos=True)))
    assert disk.began.wait(PATIENCE)
    wait_until(lambda: served.engine.stats().num_requests_waiting == 2)
    before = len(steps)
    time.sleep(0.5)
    # The second request can arrive during a step; a loop that spins takes thousands of steps.
    assert len(steps) - before <= 2
    assert served.engine.hang_reason is None
    assert served.engine.unhealthy_reason is None
    disk.go_on.set()
    served.wait(*names)
    assert [reused(served, name) for name in names] == [len(PROMPT)] * 2


def test_a_read_that_takes_too_long_is_not_waited_for(begin, tiny_models, monkeypatch):
    """The engine has no other request, and wakes up by itself; the next finds the saved prefix."""
    monkeypatch.setattr(prefix_store, "READ_SECONDS", 0.2)
    served, disk = begin()
    for name in ("one", "two"):
        wants = request(name, [*PROMPT, 5], greedy(6, ignore_eos=True), None)
        served.engine.submit(wants)
        served.wait(name)
        assert disk.began.is_set()
        assert reused(served, name) == (0 if name == "one" else len(PROMPT) + 1)
        expected = plain(tiny_models[FAMILIES[0]], wants, VOCAB).tokens
        assert tuple(served.tokens(name)) == expected


@pytest.mark.parametrize("how", ["cancel", "stop", "death"])
def test_a_request_can_end_and_the_engine_too_while_a_read_hangs(begin, monkeypatch, how):
    monkeypatch.setattr(prefix_store, "_ABANDON_SECONDS", 0.1)
    served, disk = begin()
    served.engine.submit(request("leaves", [*PROMPT, 5], greedy(6)))
    assert disk.began.wait(PATIENCE)
    if how == "cancel":
        served.engine.cancel("leaves")
    elif how == "stop":
        disk.close_seconds = 0.1
        assert served.engine.stop(PATIENCE)
        assert served.outputs["leaves"][-1].finish_reason == "error"
        return
    else:
        fail_next_turn(monkeypatch)
        served.engine.submit(request("also hit", [3, 4], greedy(6)))
        served.wait("leaves", "also hit")
        assert served.outputs["leaves"][-1].finish_reason == "error"
        wait_until(lambda: served.engine.stats().num_restarts == 1)
    # The gauges are those of the last step, which can be from before the request.
    wait_until(lambda: not disk.reading)
    wait_until(lambda: served.engine.stats().num_requests_waiting == 0)
    disk.go_on.set()
    served.engine.submit(request("stays", [*PROMPT, 5], greedy(6)))
    served.wait("stays")
    assert reused(served, "stays") == len(PROMPT)
    assert served.tokens("leaves") == []
