"""The engine on its thread: limits, faults, cancellation, and what it refuses."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.build import build_engine
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.health import RestartBudget
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.errors import (
    ContextLengthError,
    EngineStoppedError,
    InvalidRequestError,
    UsageError,
)
from mlx_mtp.sampling.params import SamplingParams
from tests.harness import Driver, OracleProposer, greedy, plain, request
from tests.tiny_models import VOCAB


class Client:
    """Collects an engine's outputs; `wait` blocks until requests have ended."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[str, list[RequestOutput]] = defaultdict(list)
        self.changed = threading.Condition()
        self._holds_when: Callable[[], bool] | None = None
        self._is_held = False
        engine.start(self._deliver)

    def _deliver(self, outputs) -> None:
        with self.changed:
            for output in outputs:
                self.outputs[output.request_id].append(output)
            self._is_held = self._holds_when is not None and self._holds_when()
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: not self._is_held, timeout=60)

    @contextlib.contextmanager
    def held_at(self, count: int, *requests: Request) -> Iterator[None]:
        """These are submitted, each has so many tokens, and the engine's thread waits meanwhile.

        Without that, a test's own thread may be so late that they have ended.
        """
        names = [each.request_id for each in requests]
        with self.changed:
            self._holds_when = lambda: all(len(self.tokens(name)) >= count for name in names)
        for each in requests:
            self.engine.submit(each)
        with self.changed:
            assert self.changed.wait_for(lambda: self._is_held, timeout=60)
        try:
            yield
        finally:
            with self.changed:
                self._holds_when, self._is_held = None, False
                self.changed.notify_all()

    def wait(self, *names: str) -> None:
        def ended() -> bool:
            return all(self.outputs[n] and self.outputs[n][-1].finish_reason for n in names)

        with self.changed:
            assert self.changed.wait_for(ended, timeout=60), f"no end of {names}"

    def wait_for_tokens(self, name: str, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.tokens(name)) >= count, timeout=60)

    def tokens(self, name: str) -> list[int]:
        return [t for o in self.outputs[name] for t in o.token_ids]


def endless(name: str) -> Request:
    return request(name, [5, 6], greedy(400, ignore_eos=True))


def wait_until(condition) -> None:
    """For what another thread will bring about."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fail_next_turn(monkeypatch) -> None:
    """The scheduler raises once, which nothing catches: it kills the engine's thread."""
    original = Scheduler.schedule

    def broken(self):
        monkeypatch.setattr(Scheduler, "schedule", original)
        raise RuntimeError("a bug in the scheduler")

    monkeypatch.setattr(Scheduler, "schedule", broken)


@pytest.fixture
def client(tiny_models):
    made = []

    def make(family="qwen3_next", **options) -> Client:
        config = options.pop("config", EngineConfig(num_draft_tokens=2, prefill_step_size=32))
        engine = build_engine(tiny_models[family], config, VOCAB, (1,), **options)
        made.append(Client(engine))
        return made[-1]

    yield make
    for each in made:
        each.engine.stop()


def test_answers_and_counts(client, tiny_models):
    served = client()
    wanted = [request(f"r{i}", range(2, 4 + i), greedy(12, ignore_eos=True)) for i in range(5)]
    for each in wanted:
        served.engine.submit(each)
    served.wait(*(r.request_id for r in wanted))
    for each in wanted:
        expected = plain(tiny_models["qwen3_next"], each, VOCAB).tokens
        assert tuple(served.tokens(each.request_id)) == expected
        assert served.outputs[each.request_id][-1].finish_reason == "length"
    stats = served.engine.stats()
    assert stats.generation_tokens == 60
    assert stats.prompt_tokens == sum(len(r.prompt_token_ids) for r in wanted)
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    drafted = sum(o.num_draft_tokens for outs in served.outputs.values() for o in outs)
    assert stats.num_draft_tokens >= drafted > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_ids_and_limits_cut_inside_a_window(tiny_models, overlap):
    """An accepted draft after the stop id, or past max_tokens, is never given out."""
    model, prompt, cuts = tiny_models["qwen3_5"], [5, 6, 7], range(1, 12)
    full = plain(model, request("x", prompt, greedy(30)), VOCAB).tokens
    names = [f"{how} {cut}" for cut in cuts for how in ("stop", "length")]
    forced = OracleProposer(dict.fromkeys(names, (*prompt, *full)), VOCAB, 1.0)
    config = EngineConfig(num_draft_tokens=5, overlap=overlap)
    for proposer in (None, forced):
        driver = Driver(model, vocab_size=VOCAB, config=config, proposer=proposer)
        for cut in cuts:
            stops = greedy(30, stop_token_ids=(full[cut], 90))
            driver.add(request(f"stop {cut}", prompt, stops))
            driver.add(request(f"length {cut}", prompt, greedy(cut)))
        got = driver.run()
        for cut in cuts:
            assert tuple(got[f"stop {cut}"]) == full[: full.index(full[cut]) + 1]
            assert tuple(got[f"length {cut}"]) == full[:cut]
        assert [driver.reason(name) for name in names] == [name.split()[0] for name in names]


@pytest.mark.parametrize("depth", [0, 2])
def test_caches_stand_still_after_the_end(tiny_models, depth):
    """The state at the end of an answer is exact: all tokens but the last are in the caches."""
    model = tiny_models["qwen3_next"]
    short = request("short", [5, 6, 7], greedy(4, ignore_eos=True))
    held = [5, 6, 7, *plain(model, short, VOCAB).tokens[:3]]
    reference = make_prompt_cache(model.model)
    model.model(mx.array([held]), cache=reference)

    driver = Driver(model, vocab_size=VOCAB, config=EngineConfig(num_draft_tokens=depth))
    driver.add(short)
    driver.add(request("long", [8, 9], greedy(30, ignore_eos=True)))
    seen = 0
    for _ in range(12):
        driver.step()
        batch = driver.runner.batches.decoding
        names = [] if batch is None else [s.request_id for s in batch.sequences]
        if "short" in names and bool(batch.ended[names.index("short")].item()):
            row = batch.cache.select(mx.array([names.index("short")]))
            assert row.offset.tolist() == [len(held)]
            for ours, theirs in zip(
                (row[0].history, row[0].state), reference[0].cache, strict=True
            ):
                np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-4)
            seen += 1
    assert seen, "the row left the batch before its end was seen"


def test_context_limit_with_drafts_in_flight(client):
    served = client(config=EngineConfig(num_draft_tokens=5, max_model_len=20))
    served.engine.submit(request("a", [5] * 15, greedy(500, ignore_eos=True)))
    served.wait("a")
    assert len(served.tokens("a")) == 5
    assert served.outputs["a"][-1].finish_reason == "length"
    with pytest.raises(ContextLengthError, match=r"20 tokens.*20 tokens"):
        served.engine.submit(request("b", [5] * 20, greedy(1)))


def test_bad_requests_are_refused(client):
    served = client()
    for bad, field in (
        (Request("b", (), greedy(1)), "prompt"),
        (Request("b", (5, VOCAB), greedy(1)), "prompt"),
        (Request("b", (5, -1), greedy(1)), "prompt"),
        (Request("b", (2**40,), greedy(1)), "prompt"),
        (Request("b", (5,), greedy(0)), "max_tokens"),
        (Request("b", (5,), greedy(1, logit_bias=((VOCAB, 1.0),))), "logit_bias"),
        (Request("b", (5,), greedy(1, stop_token_ids=(VOCAB,))), "stop_token_ids"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            served.engine.submit(bad)
        assert caught.value.param == field


def test_cancel_frees_the_row(client):
    served = client(config=EngineConfig(max_num_seqs=1))
    with served.held_at(6, endless("long")):
        served.engine.submit(request("next", [7, 8], greedy(5, ignore_eos=True)))
        served.engine.cancel("long")
        served.engine.cancel("never there")
    served.wait("next")
    assert len(served.tokens("long")) < 400
    assert served.engine.stats().num_requests_running == 0


def test_stop_ends_what_is_left_and_refuses_more(client):
    served = client()
    with served.held_at(2, endless("a")):
        stopping = threading.Thread(target=served.engine.stop)
        stopping.start()
        wait_until(lambda: not served.engine.healthy)
    stopping.join()
    served.wait("a")
    assert isinstance(served.outputs["a"][-1].error, EngineStoppedError)
    assert not served.engine.healthy
    with pytest.raises(EngineStoppedError):
        served.engine.submit(request("b", [5], greedy(1)))
    served.engine.cancel("a")


def test_an_engine_that_cannot_start_says_so_and_ends_what_waits(client, monkeypatch):
    def broken(self, *parts):
        raise MemoryError("no room for the model")

    monkeypatch.setattr(ModelRunner, "__init__", broken)
    served = client()
    with contextlib.suppress(EngineStoppedError):
        served.engine.submit(request("a", [5, 6], greedy(5)))
        served.wait("a")
        assert isinstance(served.outputs["a"][-1].error, EngineStoppedError)
    wait_until(lambda: not served.engine.healthy)
    assert "no room for the model" in served.engine.unhealthy_reason
    assert served.engine.stats().num_restarts == 3
    with pytest.raises(EngineStoppedError, match="no room for the model"):
        served.engine.submit(request("b", [5, 6], greedy(5)))


def test_a_dying_thread_ends_all_requests_and_another_takes_its_place(
    client, tiny_models, monkeypatch
):
    served = client(config=EngineConfig(max_num_seqs=1, num_draft_tokens=2))
    schedule = Scheduler.schedule
    with served.held_at(3, endless("running")):
        served.engine.submit(endless("waiting"))
        fail_next_turn(monkeypatch)
    served.wait("running", "waiting")
    for name in ("running", "waiting"):
        assert isinstance(served.outputs[name][-1].error, EngineStoppedError)
        assert "a bug in the scheduler" in str(served.outputs[name][-1].error)
    # The ends are told first, and then counted.
    wait_until(lambda: served.engine.stats().num_restarts == 1)
    counted = served.engine.stats()
    assert counted.num_requests_running == 0
    assert Scheduler.schedule is schedule
    after = request("after", [5, 6, 7], greedy(20, ignore_eos=True))
    served.engine.submit(after)
    served.wait("after")
    model = tiny_models["qwen3_next"]
    assert tuple(served.tokens("after")) == plain(model, after, VOCAB).tokens
    assert served.engine.healthy
    wait_until(lambda: served.engine.stats().generation_tokens >= counted.generation_tokens + 20)
    assert served.engine.stats().num_restarts == 1


def test_stop_waits_for_a_thread_that_is_just_being_started(client, monkeypatch):
    served = client()
    starts, go_on = threading.Event(), threading.Event()
    start = threading.Thread.start

    def slow(thread: threading.Thread) -> None:
        if thread.name == "mlx-mtp-engine":
            starts.set()
            assert go_on.wait(60)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow)
    with served.held_at(2, endless("a")):
        fail_next_turn(monkeypatch)
    assert starts.wait(60)
    stopping = threading.Thread(target=served.engine.stop)
    stopping.start()
    stopping.join(0.3)
    assert stopping.is_alive(), "it took the thread for one that has ended"
    go_on.set()
    stopping.join()
    assert not served.engine._thread.is_alive()


def test_an_end_that_was_read_but_not_told_when_the_thread_died_is_told(client, monkeypatch):
    served = client()
    stats = EngineCore.stats
    ended: list[bool] = []

    def broken(core: EngineCore):
        if core.idle and not ended:
            ended.append(True)
            raise RuntimeError("a bug behind the step")
        return stats(core)

    monkeypatch.setattr(EngineCore, "stats", broken)
    served.engine.submit(request("a", [5, 6], greedy(3, ignore_eos=True)))
    served.wait("a")
    assert isinstance(served.outputs["a"][-1].error, EngineStoppedError)
    served.engine.submit(request("b", [5, 6], greedy(3, ignore_eos=True)))
    served.wait("b")
    assert [o.finish_reason for o in served.outputs["a"] if o.finish_reason] == ["error"]
    assert served.outputs["b"][-1].finish_reason == "length"


def test_the_engine_is_restarted_three_times_in_a_minute_and_then_no_more(client, monkeypatch):
    served = client()
    for number in range(4):
        assert served.engine.healthy
        with served.held_at(2, endless(f"r{number}")):
            fail_next_turn(monkeypatch)
        served.wait(f"r{number}")
    wait_until(lambda: not served.engine.healthy)
    assert "a bug in the scheduler" in served.engine.unhealthy_reason
    assert served.engine.stats().num_restarts == 3
    with pytest.raises(EngineStoppedError, match="a bug in the scheduler"):
        served.engine.submit(request("late", [5, 6], greedy(5)))


def test_a_minute_later_it_may_be_restarted_again():
    now = 0.0
    budget = RestartBudget(lambda: now)
    assert [budget.acquire() for _ in range(4)] == [True, True, True, False]
    now = 59.0
    assert not budget.acquire()
    now = 60.0
    assert [budget.acquire() for _ in range(4)] == [True, True, True, False]


def test_an_idle_engine_holds_no_rows(client, monkeypatch):
    runners: list[ModelRunner] = []
    original = ModelRunner.__init__

    def noted(self, *parts):
        runners.append(self)
        original(self, *parts)

    gc.collect()  # What earlier tests left would be freed, and cached, in between.
    # Looked at on the engine's thread: what other threads free later is cached again.
    left: list[tuple[object, ...]] = []
    release = ModelRunner.release

    def looked_at(self):
        release(self)
        batches = self.batches
        left.append((batches.decoding, batches.ready, batches.prefilling, mx.get_cache_memory()))

    monkeypatch.setattr(ModelRunner, "__init__", noted)
    monkeypatch.setattr(ModelRunner, "release", looked_at)
    served = client(config=EngineConfig(num_draft_tokens=2, prefill_step_size=32))
    for name, length in (("a", 8), ("b", 40)):
        with served.held_at(4, request(name, range(2, 40), greedy(length, ignore_eos=True))):
            assert runners[0].batches.decoding is not None
            if name == "b":
                served.engine.cancel(name)
        wait_until(lambda: left)
        assert left.pop() == (None, [], {}, 0)


def test_settings_out_of_range_are_refused(tiny_models):
    for config, text in (
        (EngineConfig(num_draft_tokens=9), "0 to 8"),
        (EngineConfig(num_draft_tokens="some"), "auto"),
        (EngineConfig(num_draft_tokens=True), "0 to 8"),
        (EngineConfig(max_model_len=1), "2 to 512"),
        (EngineConfig(max_model_len=513), "2 to 512"),
        (EngineConfig(max_num_seqs=0), "max_num_seqs"),
        (EngineConfig(prefill_step_size=0), "prefill_step_size"),
    ):
        with pytest.raises(UsageError, match=text):
            build_engine(tiny_models["qwen3_5"], config, VOCAB, ())


def test_logprobs_of_accepted_tokens_are_the_true_ones(tiny_models):
    """Not 0 or 1, and the same with MTP on and off."""
    model = tiny_models["qwen3_5_moe"]
    sampling = SamplingParams(max_tokens=15, temperature=0.8, seed=4, top_logprobs=3)
    wanted = [request("a", [5, 6, 7], sampling), request("b", [5, 6], greedy(15))]
    answers = {r.request_id: (*r.prompt_token_ids, *plain(model, r, VOCAB).tokens) for r in wanted}
    reports = []
    for depth in (0, 3):
        config = EngineConfig(num_draft_tokens=depth)
        forced = OracleProposer(answers, VOCAB, 1.0)
        driver = Driver(model, vocab_size=VOCAB, config=config, proposer=forced)
        for each in wanted:
            driver.add(each)
        driver.run()
        reports.append([p for o in driver.outputs["a"] for p in o.logprobs])
        assert all(not o.logprobs for o in driver.outputs["b"])
    plain_report, mtp_report = reports
    assert len(plain_report) == len(mtp_report) == 15
    for one, other in zip(plain_report, mtp_report, strict=True):
        assert one.logprob < 0.0
        assert abs(one.logprob - other.logprob) < 1e-4
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
        assert one.top[0][1] >= one.logprob


def test_padded_vocabulary_is_never_sampled(tiny_models):
    driver = Driver(tiny_models["qwen3_next"], vocab_size=VOCAB - 60)
    for seed in range(6):
        sampling = SamplingParams(max_tokens=20, temperature=3.0, seed=seed)
        driver.add(request(f"r{seed}", [5, 6, 7], sampling))
    for tokens in driver.run().values():
        assert max(tokens) < VOCAB - 60
