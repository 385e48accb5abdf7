"""Prometheus metrics: the engine's counters as they are when asked for, and two latencies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_mtp.engine.stats import EngineStats
from mlx_mtp.server.gate import REASONS, Gate

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

PREFIX = "mlx_mtp:"
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)


class EngineCollector(Collector):
    """Reads the engine's statistics at each scrape, so that nothing is counted twice."""

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        """The gauges and counters, in Prometheus' own types."""
        stats = self._engine.stats()
        yield _gauge("num_requests_running", "Requests in a batch.", stats.num_requests_running)
        yield _gauge(
            "num_requests_waiting", "Requests not yet admitted.", stats.num_requests_waiting
        )
        yield _gauge(
            "num_requests_held", "Sequences running, waiting or being prepared.", self._gate.held
        )
        yield _counter("engine_restarts", "Deaths of the engine's thread.", stats.num_restarts)
        yield _labelled(
            CounterMetricFamily,
            "requests_rejected",
            "Requests refused before any work was done for them.",
            "reason",
            ((reason, self._gate.rejected[reason]) for reason in REASONS),
        )
        yield _counter("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        prefixes = stats.prefix_cache
        yield _counter("prefix_cache_queries", "Prompt tokens looked up.", prefixes.queries)
        yield _counter("prefix_cache_hits", "Those found, and not computed.", prefixes.hits)
        yield _gauge("prefix_cache_bytes", "Memory of the prefix cache.", prefixes.nbytes)
        yield _gauge(
            "prefix_cache_entries", "Prefixes that a prompt can go on from.", prefixes.num_entries
        )
        yield _gauge("prefix_cache_files", "Prefixes on the disk.", prefixes.num_files)
        yield _gauge("prefix_cache_file_bytes", "What these take.", prefixes.file_nbytes)
        yield _counter(
            "prefix_cache_files_written", "Prefixes written.", prefixes.num_files_written
        )
        yield _counter(
            "prefix_cache_files_dropped",
            "Prefixes not written: the disk is slow or full, or they are too large.",
            prefixes.num_files_dropped,
        )
        yield from self._speculation(stats)

    def _speculation(self, stats: EngineStats) -> Iterable[Metric]:
        yield _counter("spec_decode_num_drafts", "Windows of drafts verified.", stats.num_drafts)
        yield _counter("spec_decode_num_draft_tokens", "Drafts verified.", stats.num_draft_tokens)
        yield _counter(
            "spec_decode_num_accepted_tokens", "Drafts accepted.", stats.num_accepted_tokens
        )
        yield _labelled(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position in the window.",
            "position",
            enumerate(stats.num_accepted_tokens_per_pos),
        )
        if self._engine.info.mtp_enabled:
            yield _labelled(
                GaugeMetricFamily,
                "spec_decode_depth",
                "Drafts per step chosen last for this batch size.",
                "batch_size",
                stats.depths,
            )
            yield _gauge(
                "spec_decode_parked", "1: the last step was planned without drafts.", stats.parked
            )


class Metrics:
    """One app's metrics, in a registry of its own."""

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, gate))
        self._timeouts = Counter(
            PREFIX + "request_timeouts",
            "Requests that took longer than --request-timeout.",
            registry=self._registry,
        )
        self._first_token = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "From a request's arrival in the engine to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._between_tokens = Histogram(
            PREFIX + "inter_token_latency_seconds",
            "Time per token after the first; the tokens of one step share its time.",
            buckets=_TOKEN_BUCKETS,
            registry=self._registry,
        )

    def first_token(self, seconds: float) -> None:
        """A request's first token came after this time."""
        self._first_token.observe(seconds)

    def more_tokens(self, seconds: float, count: int) -> None:
        """Some more tokens of a request came in one step, after this time."""
        for _ in range(count):
            self._between_tokens.observe(seconds / count)

    def timed_out(self) -> None:
        """A request has taken too long."""
        self._timeouts.inc()

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


def _gauge(name: str, text: str, value: int) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _labelled(
    family: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Iterable[tuple[object, int]],
) -> Metric:
    """A series for each of the label's values."""
    found = family(PREFIX + name, text, labels=[label])
    for key, value in values:
        found.add_metric([str(key)], value)
    return found
