"""Engines without HTTP: stepped by hand, observed while they run, or with known drafts."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.grammar_masks import TokenSampler
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.draft_policy import FixedDrafts
from mlx_mtp.speculative.drafter import Computed, DeferredWrites, MTPDrafter

MakeRunner = Callable[[LoadedModel, MTPDrafter | None, int], ModelRunner]
ENDLESS = 1 << 20
_PATIENCE = 600.0


def core_of(
    model: LoadedModel,
    depth: int | None,
    *,
    overlap: bool = True,
    make_runner: MakeRunner = ModelRunner,
    **config: Any,
) -> EngineCore:
    """Returns an engine core that drafts `depth` tokens per step (None: without a draft head).

    `config` are fields of `EngineConfig`.
    """
    drafter = None if depth is None else MTPDrafter(model)
    scheduler = Scheduler(EngineConfig(**config), FixedDrafts(depth or 0))
    runner = make_runner(model, drafter, model.vocab_size)
    return EngineCore(scheduler, runner, overlap=overlap)


def row_of(name: str, prompt: Many[int], max_tokens: int = ENDLESS, **sampling: Any) -> Sequence:
    """Returns a sequence that only `max_tokens` ends, greedy by default."""
    params = SamplingParams(max_tokens, **{"temperature": 0.0, **sampling})
    return Sequence(Request(name, tuple(prompt), params), (), max_tokens)


def random_ids(vocab_size: int, count: int, seed: int) -> list[int]:
    """Returns `count` random token ids for a prompt."""
    return mx.random.randint(10, vocab_size, (count,), key=mx.random.key(seed)).tolist()  # type: ignore[return-value]


def decode(core: EngineCore, rows: Many[Sequence]) -> None:
    """Add rows, and step until each has its first token."""
    for row in rows:
        core.scheduler.add(row)
    while not all(row.output for row in rows):
        core.step()


class Listener:
    """Runs an engine, and records when (`perf_counter`) the outputs of each request arrive."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.times: dict[str, list[float]] = {}
        self.num_reused: dict[str, int] = {}
        self._ended: set[str] = set()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        engine.start(self._deliver)

    def ask(self, name: str, prompt: Many[int], max_tokens: int) -> float:
        """Submit a greedy request; returns the time of submission."""
        self.times[name], self.num_reused[name] = [], 0
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        self.engine.submit(Request(name, tuple(prompt), sampling))
        return began

    def wait(self, name: str, outputs: int | None = None) -> None:
        """Wait for `outputs` outputs of a request (None: its end); raises any request's error."""

        def there() -> bool:
            has = name in self._ended if outputs is None else len(self.times[name]) >= outputs
            return has or self._error is not None

        with self._changed:
            assert self._changed.wait_for(there, _PATIENCE), name
        if self._error is not None:
            raise self._error

    def gaps(self, name: str, began: float, ended: float) -> list[float]:
        """Returns a request's gaps between outputs, in seconds, that overlap `began` to `ended`."""
        times = self.times[name]
        return [b - a for a, b in pairwise(times) if b > began and a < ended]

    def _deliver(self, outputs: Many[RequestOutput]) -> None:
        now = time.perf_counter()
        with self._changed:
            for output in outputs:
                self._error = self._error or output.error
                if output.token_ids:
                    self.times[output.request_id].append(now)
                self.num_reused[output.request_id] += output.num_reused_tokens
                if output.finish_reason:
                    self._ended.add(output.request_id)
            self._changed.notify_all()


@contextmanager
def listening(engine: Engine) -> Iterator[Listener]:
    """Start an engine; it is stopped at the end, even if requests still run."""
    try:
        yield Listener(engine)
    finally:
        engine.stop()


class TellingDrafter(MTPDrafter):
    """Runs the head, then replaces its drafts: at `rate` by the right tokens, else by wrong ones.

    `texts[seed]` holds the prompt and the answer of the request with that seed.
    """

    def __init__(self, model: LoadedModel, texts: Many[Many[int]], rate: float) -> None:
        super().__init__(model)
        self.rate = rate
        self._keys = map(mx.random.key, itertools.count())
        self.tell(texts)

    def tell(self, texts: Many[Many[int]]) -> None:
        longest = max(map(len, texts))
        self.known = mx.array([[*text, *[0] * (longest - len(text))] for text in texts], mx.int32)
        self._draws = mx.random.uniform(shape=self.known.shape, key=next(self._keys))
        mx.eval(self.known, self._draws)  # They are evaluated here: engines have their own threads.

    def at(self, positions: mx.array, sampler: TokenSampler) -> mx.array:
        """Returns the known tokens at int positions [B, T]."""
        return _taken(self.known, positions, sampler)

    def propose(
        self, state: DeferredWrites, window: Computed, num_drafts: Many[int], sampler: TokenSampler
    ) -> mx.array:
        drafts = super().propose(state, window, num_drafts, sampler)
        if not any(num_drafts):
            return drafts
        first = window.packing.positions[window.last] + 2
        positions = first[:, None] + mx.arange(drafts.shape[1])
        is_right = _taken(self._draws, positions, sampler) < self.rate
        right = self.at(positions, sampler)
        # The result depends on the head's drafts, so that mlx still computes them.
        return mx.where((drafts >= 0) & is_right, right, right ^ 1).astype(mx.int32)


def _taken(table: mx.array, positions: mx.array, sampler: TokenSampler) -> mx.array:
    """Returns the entries at positions [B, T] of the table's rows that the requests' seeds name."""
    assert isinstance(sampler, Sampler)
    rows = table[mx.array([params.seed for params in sampler.params])]
    return mx.take_along_axis(rows, mx.minimum(positions, rows.shape[1] - 1), axis=1)


@contextmanager
def telling(teller: TellingDrafter) -> Iterator[None]:
    """Replace what every engine samples by the tokens that `teller` knows; it still samples."""
    draw = Sampler.draw

    def told(sampler: Sampler, logits: mx.array, at: mx.array, *more: Any, **also: Any) -> mx.array:
        drawn = draw(sampler, logits, at, *more, **also)
        return mx.where(drawn >= 0, teller.at(at, sampler), drawn)

    with patch.object(Sampler, "draw", told):
        yield
