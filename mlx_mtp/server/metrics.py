"""Prometheus metrics: the engine's counters as they are when asked for, and two latencies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_mtp.server.admission import REASONS, RequestLimiter

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

PREFIX = "mlx_mtp:"
_MAX_NAMES = 100  # of parameters, which clients choose
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics(Collector):
    """One app's metrics, in a registry of its own."""

    def __init__(self, engine: Engine, limiter: RequestLimiter) -> None:
        self._engine, self._limiter = engine, limiter
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)

        text = "Requests that took longer than --request-timeout."
        self.timeouts = Counter(PREFIX + "request_timeouts", text, registry=self._registry)
        text = (
            f"Requests with a parameter that had no effect; names after {_MAX_NAMES} are `other`."
        )
        labels, name = ["parameter"], PREFIX + "ignored_parameters"
        self._ignored = Counter(name, text, labels, registry=self._registry)
        self._ignored_names: set[str] = set()
        text = "From a request's arrival in the engine to its first token."
        self.first_token = histogram("time_to_first_token_seconds", text, _FIRST_TOKEN_BUCKETS)
        text = "Time per token after the first; the tokens of one step share its time."
        self.inter_token = histogram("inter_token_latency_seconds", text, _TOKEN_BUCKETS)

    def count_ignored(self, names: Iterable[str]) -> None:
        """Count the parameters of a request that had no effect."""
        for name in names:
            if len(self._ignored_names) < _MAX_NAMES:
                self._ignored_names.add(name)
            self._ignored.labels(name if name in self._ignored_names else "other").inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        stats, limiter = self._engine.stats(), self._limiter
        prefixes = stats.prefix_cache
        dropped = "Prefixes not written: the disk is slow or full, or they are too large."
        gauges = [
            ("num_requests_running", "Requests in a batch.", stats.num_requests_running),
            ("num_requests_waiting", "Requests not yet admitted.", stats.num_requests_waiting),
            ("num_requests_held", "Sequences running, waiting or being prepared.", limiter.held),
            ("prefix_cache_bytes", "Memory of the prefix cache.", prefixes.nbytes),
            ("prefix_cache_entries", "Prefixes a prompt can go on from.", prefixes.num_entries),
            ("prefix_cache_files", "Prefixes on the disk.", prefixes.num_files),
            ("prefix_cache_file_bytes", "What these take.", prefixes.file_nbytes),
        ]
        counters = [
            ("engine_restarts", "Deaths of the engine's thread.", stats.num_restarts),
            ("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", prefixes.queries),
            ("prefix_cache_hits", "Those found, and not computed.", prefixes.hits),
            ("prefix_cache_files_written", "Prefixes written.", prefixes.num_files_written),
            ("prefix_cache_files_dropped", dropped, prefixes.num_files_dropped),
            ("spec_decode_num_drafts", "Windows of drafts verified.", stats.num_drafts),
            ("spec_decode_num_draft_tokens", "Drafts verified.", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts accepted.", stats.num_accepted_tokens),
        ]
        if self._engine.info.mtp_enabled:
            parked = "1: the last step was planned without drafts."
            gauges.append(("spec_decode_parked", parked, stats.parked))
            text = "Drafts per step chosen last for this batch size."
            depths = GaugeMetricFamily(PREFIX + "spec_decode_depth", text, labels=["batch_size"])
            yield _filled(depths, stats.depths)
        yield from (GaugeMetricFamily(PREFIX + name, *rest) for name, *rest in gauges)
        yield from (CounterMetricFamily(PREFIX + name, *rest) for name, *rest in counters)
        text = "Requests rejected before any work was done for them."
        rejected = CounterMetricFamily(PREFIX + "requests_rejected", text, labels=["reason"])
        yield _filled(rejected, [(reason, limiter.rejected[reason]) for reason in REASONS])
        name = PREFIX + "spec_decode_num_accepted_tokens_per_pos"
        text = "Drafts accepted, by position in the window."
        accepted = CounterMetricFamily(name, text, labels=["position"])
        yield _filled(accepted, enumerate(stats.num_accepted_tokens_per_pos))


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[object, int]]
) -> Metric:
    for key, value in values:
        family.add_metric([str(key)], value)
    return family
