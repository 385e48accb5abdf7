"""The engine on its thread: limits, faults, cancellation and refused requests."""

import contextlib
import gc
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_mtp import build as build_module
from mlx_mtp.build import build_engine, plan_for
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import engine as engine_module
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.health import acquire_restart
from mlx_mtp.engine.request import Request, RequestOptions, RequestOutput
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.errors import ContextLengthError, EngineStoppedError, InvalidRequestError, UsageError
from mlx_mtp.machine import MemoryLimit
from mlx_mtp.sampling.params import SamplingParams
from tests.support.cases import SPECS
from tests.support.grammars import compiled
from tests.support.harness import greedy, plain, request
from tests.support.tiny_models import VOCAB
from tests.support.waiting import wait_until


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
    def held_at(self, count: int, wanted: Request) -> Iterator[None]:
        """Submit a request; the engine's thread waits in the context once it has `count` tokens."""
        with self.changed:
            self._holds_when = lambda: len(self.tokens(wanted.request_id)) >= count
        self.engine.submit(wanted)
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


def fail_next_turn(monkeypatch) -> None:
    """Make the scheduler raise once, outside everything that catches errors of steps."""
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


def test_answers_and_counts_and_a_cancel_that_frees_the_row(client, tiny_models):
    served = client(config=EngineConfig(max_num_seqs=1, num_draft_tokens=2))
    with served.held_at(6, endless("long")):
        served.engine.cancel("never there")
        served.engine.cancel("long")
        wanted = [request(f"r{i}", range(2, 4 + i), greedy(12, ignore_eos=True)) for i in range(3)]
        for each in wanted:
            served.engine.submit(each)
        assert served.engine.stats().num_requests_running == 1
    served.wait(*(r.request_id for r in wanted))
    for each in wanted:
        expected = plain(tiny_models["qwen3_next"], each, VOCAB).tokens
        assert tuple(served.tokens(each.request_id)) == expected
        assert served.outputs[each.request_id][-1].finish_reason == "length"
    stats = served.engine.stats()
    assert stats.generation_tokens == 36 + len(served.tokens("long")) < 100
    assert stats.prompt_tokens == 2 + 2 + 3 + 4
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)


def test_the_context_limit_with_drafts_in_flight_and_bad_requests(client):
    served = client(config=EngineConfig(num_draft_tokens=5, max_model_len=20))
    served.engine.submit(request("a", [5] * 15, greedy(500, ignore_eos=True)))
    for bad, field in (
        (Request("b", (), greedy(1)), "prompt"),
        (Request("b", (5, VOCAB), greedy(1)), "prompt"),
        (Request("b", (5, -1), greedy(1)), "prompt"),
        (Request("b", (5,), greedy(-1)), "max_tokens"),
        (Request("b", (5,), greedy(1, logit_bias=((VOCAB, 1.0),))), "logit_bias"),
        (Request("b", (5,), greedy(1, stop_token_ids=(VOCAB,))), "stop_token_ids"),
        (
            Request("b", (5,), greedy(1), options=RequestOptions(num_draft_tokens=9)),
            "mtp.num_draft_tokens",
        ),
        (Request("b", (5,), greedy(3, grammar=SPECS[0])), None),
        (request("b", [5], greedy(3, ignore_eos=True), compiled(SPECS[0])), "ignore_eos"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            served.engine.submit(bad)
        assert caught.value.param == field
    with pytest.raises(ContextLengthError, match=r"20 tokens.*20 tokens"):
        served.engine.submit(request("b", [5] * 20, greedy(1)))
    served.wait("a")
    assert len(served.tokens("a")) == 5
    assert served.outputs["a"][-1].finish_reason == "length"


def test_rows_run_together_only_where_the_memory_plan_has_room(client, tiny_models):
    config = EngineConfig(num_draft_tokens=2)
    plan = plan_for(tiny_models["qwen3_next"], config, MemoryLimit(10**9, "a test"))
    served = client(config=config, memory=replace(plan, rows=plan.footprint.row_bytes(512)))
    # A row takes at least the memory of 256 tokens.
    with served.held_at(2, request("long", [5] * 300, greedy(30, ignore_eos=True))):
        served.engine.submit(request("short", [5, 6], greedy(1)))
    served.wait("short")
    assert served.outputs["long"][-1].finish_reason == "length"


def test_the_padding_of_the_vocabulary_is_never_sampled(tiny_models):
    served = Client(build_engine(tiny_models["qwen3_next"], EngineConfig(), VOCAB - 60, ()))
    for seed in range(6):
        sampling = SamplingParams(max_tokens=20, temperature=3.0, seed=seed)
        served.engine.submit(request(f"r{seed}", [5, 6, 7], sampling))
    served.wait(*(f"r{seed}" for seed in range(6)))
    served.engine.stop()
    assert max(token for name in served.outputs for token in served.tokens(name)) < VOCAB - 60


def test_stop_ends_what_is_left_and_refuses_more(client):
    served = client()
    with served.held_at(2, endless("a")):
        stopping = threading.Thread(target=served.engine.stop)
        stopping.start()
        wait_until(lambda: served.engine.unhealthy_reason)
    stopping.join()
    check_stopped(served, "a", "the engine is stopping")
    served.engine.cancel("a")


def check_stopped(served: Client, name: str, reason: str) -> None:
    """Check that a request ended with this reason, and that new requests are refused with it."""
    served.wait(name)
    error = served.outputs[name][-1].error
    assert isinstance(error, EngineStoppedError)
    assert reason in str(error)
    wait_until(lambda: served.engine.unhealthy_reason)
    assert reason in served.engine.unhealthy_reason
    with pytest.raises(EngineStoppedError, match=reason):
        served.engine.submit(request("late", [5, 6], greedy(5)))


def test_an_engine_that_cannot_start_says_so_and_ends_what_waits(client, monkeypatch):
    def broken(self, *parts):
        raise MemoryError("no room for the model")

    monkeypatch.setattr(ModelRunner, "__init__", broken)
    served = client()
    with contextlib.suppress(EngineStoppedError):
        served.engine.submit(request("a", [5, 6], greedy(5)))
    wait_until(lambda: served.engine.stats().num_restarts == 3 and served.engine.unhealthy_reason)
    assert "no room for the model" in served.engine.unhealthy_reason
    assert served.outputs["a"][:1] == [] or served.outputs["a"][-1].finish_reason == "error"


def test_a_first_answer_that_takes_long_is_told(tiny_models, monkeypatch, caplog):
    monkeypatch.setattr(engine_module, "NOTICE_SECONDS", 0.001)
    monkeypatch.setattr(build_module, "warm_up", lambda *_: wait_until(lambda: caplog.records))
    engine = build_engine(tiny_models["qwen3_next"], EngineConfig(), VOCAB, (), check=True)
    engine.launch()
    engine.stop()
    assert "first answer" in caplog.records[0].getMessage()


def test_what_nothing_catches_ends_all_requests_and_the_same_thread_goes_on(
    client, tiny_models, monkeypatch
):
    """The engine restarts on the same thread, because the C library keeps memory per thread."""
    served = client(config=EngineConfig(max_num_seqs=1, num_draft_tokens=2))
    thread = served.engine._thread
    with served.held_at(3, endless("running")):
        served.engine.submit(endless("waiting"))
        fail_next_turn(monkeypatch)
    served.wait("running", "waiting")
    for name in ("running", "waiting"):
        assert isinstance(served.outputs[name][-1].error, EngineStoppedError)
        assert "a bug in the scheduler" in str(served.outputs[name][-1].error)
    # The requests' ends are delivered first, and counted afterwards.
    wait_until(lambda: served.engine.stats().num_restarts == 1)
    counted = served.engine.stats()
    assert counted.num_requests_running == 0
    after = request("after", [5, 6, 7], greedy(20, ignore_eos=True))
    served.engine.submit(after)
    served.wait("after")
    model = tiny_models["qwen3_next"]
    assert tuple(served.tokens("after")) == plain(model, after, VOCAB).tokens
    assert served.engine.unhealthy_reason is None
    assert served.engine._thread is thread and thread.is_alive()
    wait_until(lambda: served.engine.stats().generation_tokens >= counted.generation_tokens + 20)


def test_an_end_that_was_read_but_not_told_when_the_thread_died_is_told(client, monkeypatch):
    served = client()
    stats = Scheduler.stats
    ended: list[bool] = []

    def broken(scheduler: Scheduler):
        if scheduler.idle and not ended:
            ended.append(True)
            raise RuntimeError("a bug behind the step")
        return stats(scheduler)

    monkeypatch.setattr(Scheduler, "stats", broken)
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
        assert served.engine.unhealthy_reason is None
        with served.held_at(2, endless(f"r{number}")):
            fail_next_turn(monkeypatch)
        served.wait(f"r{number}")
    check_stopped(served, "r3", "a bug in the scheduler")
    assert served.engine.stats().num_restarts == 3
    # It can be restarted again a minute later.
    restarts = deque([0.0, 0.0, 0.0])
    assert not acquire_restart(restarts, 59.0)
    assert [acquire_restart(restarts, 60.0) for _ in range(4)] == [True, True, True, False]


def test_an_idle_engine_holds_no_rows(client, monkeypatch):
    gc.collect()  # Else leftovers of earlier tests could be freed, and cached, during the test.
    # Checked on the engine's thread, because memory that other threads free later is cached again.
    left: list[tuple[object, ...]] = []
    release = ModelRunner.release

    def looked_at(self):
        release(self)
        batches = self.batches
        left.append((batches.decoding, batches.ready, batches.prefilling, mx.get_cache_memory()))

    monkeypatch.setattr(ModelRunner, "release", looked_at)
    served = client()
    for name, length in (("a", 8), ("b", 40)):
        with served.held_at(4, request(name, range(2, 40), greedy(length, ignore_eos=True))):
            assert served.engine._core.runner.batches.decoding is not None
            if name == "b":
                served.engine.cancel(name)
        wait_until(lambda: left)
        assert left.pop() == (None, [], [], 0)


def test_settings_out_of_range_are_refused(tiny_models):
    for name, value, text in (
        ("num_draft_tokens", 9, "num_draft_tokens: 9 is not between 0 and 8"),
        ("kv_cache_quantization", 3, "none, 8, 4"),
        ("num_draft_tokens", "some", "auto"),
        ("prefix_cache_size", -1, "not a size"),
        ("max_model_len", 513, "2 to 512"),
        ("max_num_seqs", 0, "max_num_seqs"),
        ("prefill_step_size", 0, "prefill_step_size"),
    ):
        with pytest.raises(UsageError, match=text):
            build_engine(tiny_models["qwen3_5"], EngineConfig(**{name: value}), VOCAB, ())
