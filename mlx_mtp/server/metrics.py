"""Prometheus metrics, defined in tables: observed as events happen, or read when requested."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client import generate_latest as as_text
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_mtp import __version__
from mlx_mtp.config import ServerConfig
from mlx_mtp.server.http.admission import REASONS, RequestLimiter

if TYPE_CHECKING:
    from mlx_mtp.engine.engine import Engine

PREFIX = "mlx_mtp:"
_MAX_NAMES = 100  # ignored parameters counted by name: clients choose these names
_STARTED = time.time()
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

# Observed once per sequence, except the time per token: once per token. Help text, buckets.
HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "From a request's arrival in the engine to its first token.",
        _SECONDS,
    ),
    "inter_token_latency_seconds": (
        "Time per token after the first; the tokens of one step share its time.",
        _TOKEN_SECONDS,
    ),
    "e2e_request_latency_seconds": ("From arrival in the engine to the last token.", _SECONDS),
    "request_queue_time_seconds": ("From arrival to the prefill's start.", _SECONDS),
    "request_prefill_time_seconds": ("From the prefill's start to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt, those from the cache included.", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", _TOKENS),
}
# Counted as events happen: help text, labels.
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "request_timeouts": ("Requests that took longer than --request-timeout.", ()),
    "request_success": ("Sequences that have ended, by reason.", ("finished_reason",)),
    "http_requests": ("HTTP requests answered, by route and status.", ("route", "status")),
    "ignored_parameters": (
        f"Requests with a parameter that had no effect; names after {_MAX_NAMES} are `other`.",
        ("parameter",),
    ),
}
# Read when requested: help text, path to an attribute of the engine's statistics or the limiter.
_GAUGES = {
    "num_requests_running": ("Requests in a batch.", "stats.num_requests_running"),
    "num_requests_waiting": ("Requests not yet admitted.", "stats.num_requests_waiting"),
    "num_requests_held": ("Sequences running, waiting or being prepared.", "limiter.num_reserved"),
    "prefill_tokens": ("Tokens of the prompts that are being computed.", "stats.prefill_tokens"),
    "prefill_tokens_done": (
        "Tokens of these prompts that are computed or came from the prefix cache.",
        "stats.prefill_tokens_done",
    ),
    "kv_cache_usage_perc": ("Used share of the memory for rows; 1 is all.", "stats.kv_usage"),
    "prefix_cache_bytes": ("Memory of the prefix cache.", "stats.prefix_cache.nbytes"),
    "prefix_cache_entries": (
        "Prefixes in memory from which a prompt can continue.",
        "stats.prefix_cache.num_entries",
    ),
    "prefix_cache_files": ("Prefixes on the disk.", "stats.prefix_cache.num_files"),
    "prefix_cache_file_bytes": (
        "Bytes of the prefixes on the disk.",
        "stats.prefix_cache.file_nbytes",
    ),
}
_TOTALS = {
    "engine_restarts": ("Restarts after an error that nothing caught.", "stats.num_restarts"),
    "prompt_tokens": ("Prompt tokens computed.", "stats.prompt_tokens"),
    "generation_tokens": ("Tokens generated.", "stats.generation_tokens"),
    "prefix_cache_queries": ("Prompt tokens looked up.", "stats.prefix_cache.queries"),
    "prefix_cache_hits": (
        "Prompt tokens found in the prefix cache, and so not computed.",
        "stats.prefix_cache.hits",
    ),
    "prefix_cache_files_written": ("Prefixes written.", "stats.prefix_cache.num_files_written"),
    "prefix_cache_files_dropped": (
        "Prefixes not written: the disk is slow or full, or they are too large.",
        "stats.prefix_cache.num_files_dropped",
    ),
    "spec_decode_num_drafts": ("Windows of drafts verified.", "stats.num_draft_windows"),
    "spec_decode_num_draft_tokens": (
        "Drafts verified; those copied from earlier answers if they were accepted.",
        "stats.num_draft_tokens",
    ),
    "spec_decode_num_accepted_tokens": ("Drafts accepted.", "stats.num_accepted_tokens"),
    "spec_decode_num_optimistic_tokens": (
        "Drafts accepted in place of other tokens that the model drew (--mtp-optimistic).",
        "stats.num_optimistic_tokens",
    ),
}
# Metrics with the same meaning in vLLM: its name, and an older one that dashboards still use.
_IN_VLLM: dict[str, tuple[str, ...]] = {
    name: (name,)
    for name in (
        *HISTOGRAMS,
        *("num_requests_running", "num_requests_waiting", "request_success", "prompt_tokens"),
        *("generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
        *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
    )
}
_IN_VLLM |= {
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}


@dataclass(slots=True)
class SequenceTimes:
    """`perf_counter` times of a sequence's arrival in the engine, admission and tokens."""

    arrived: float
    admitted: float
    first: float  # first token
    last: float  # latest token


class Metrics(Collector):
    """One application's metrics, in a registry of its own; each sample has the model's name.

    No lock: only the event loop observes and counts.
    """

    def __init__(self, engine: Engine, limiter: RequestLimiter, config: ServerConfig) -> None:
        self._engine, self._limiter = engine, limiter
        self._model_name, self._with_vllm = config.model_name, config.vllm_metrics
        self._observed = CollectorRegistry()
        self._histograms = {
            name: Histogram(PREFIX + name, text, buckets=buckets, registry=self._observed)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, text, labels, registry=self._observed)
            for name, (text, labels) in COUNTERS.items()
        }
        self._ignored_names: set[str] = set()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # has samples only where /proc exists

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def observed(self, name: str) -> tuple[int, float]:
        """Returns the number and the sum of a histogram's observations."""
        (family,) = self._histograms[name].collect()
        values = {sample.name: sample.value for sample in family.samples}
        return int(values[f"{PREFIX}{name}_count"]), values[f"{PREFIX}{name}_sum"]

    def observe_sequence(self, times: SequenceTimes, num_prompt: int, num_tokens: int) -> None:
        """Observe a finished sequence, which was neither cancelled nor failed.

        `num_prompt` and `num_tokens` count the tokens of its prompt and its answer.
        """
        self.observe("e2e_request_latency_seconds", times.last - times.arrived)
        self.observe("request_queue_time_seconds", times.admitted - times.arrived)
        self.observe("request_prefill_time_seconds", times.first - times.admitted)
        self.observe("request_decode_time_seconds", times.last - times.first)
        self.observe("request_prompt_tokens", num_prompt)
        self.observe("request_generation_tokens", num_tokens)

    def count(self, name: str, *labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc()

    def error_counts(self) -> list[tuple[str, str, int]]:
        """Returns (route, status, number of responses) for each route and error status so far."""
        (family,) = self._counters["http_requests"].collect()
        return [
            (each.labels["route"], each.labels["status"], int(each.value))
            for each in family.samples
            if each.name.endswith("_total") and each.labels["status"] >= "400"
        ]

    def count_ignored(self, names: Iterable[str]) -> None:
        """Count a request's ignored parameters."""
        for name in names:
            if len(self._ignored_names) < _MAX_NAMES:
                self._ignored_names.add(name)
            known = name in self._ignored_names
            self.count("ignored_parameters", name if known else "other")

    def render(self) -> bytes:
        return as_text(self._registry)

    def collect(self) -> Iterator[Metric]:
        for family in (*self._observed.collect(), *self._read_families()):
            twins = _IN_VLLM.get(family.name.removeprefix(PREFIX), ()) if self._with_vllm else ()
            for name in (family.name, *(f"vllm:{twin}" for twin in twins)):
                named = Metric(name, family.documentation, family.type)
                named.samples = [
                    sample._replace(
                        name=name + sample.name.removeprefix(family.name),
                        labels={"model_name": self._model_name, **sample.labels},
                    )
                    for sample in family.samples
                    if not sample.name.endswith("_created")
                ]
                yield named
        if sys.platform != "linux":
            text = "CPU time of user and system."
            yield CounterMetricFamily("process_cpu_seconds", text, time.process_time())
            yield GaugeMetricFamily("process_start_time_seconds", "Start, since 1970.", _STARTED)

    def _read_families(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        source = SimpleNamespace(stats=stats, limiter=self._limiter)
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _TOTALS)):
            for name, (text, where) in table.items():
                yield kind(PREFIX + name, text, attrgetter(where)(source))

        def with_labels(
            kind: type[CounterMetricFamily | GaugeMetricFamily],
            name: str,
            text: str,
            labels: Sequence[str],
            samples: Iterable[tuple[Any, ...]],  # label values, then the sample's value
        ) -> Metric:
            family = kind(PREFIX + name, text, labels=labels)
            for *values, value in samples:
                family.add_metric(list(map(str, values)), value)
            return family

        if self._engine.info.draft_sources:
            text = "1: the last step was planned without drafts."
            yield GaugeMetricFamily(PREFIX + "spec_decode_parked", text, stats.parked)
            text = "Drafts per row and step chosen last for this batch size."
            labels = ["batch_size"]
            yield with_labels(GaugeMetricFamily, "spec_decode_depth", text, labels, stats.depths)
        text = "Requests rejected before any work was done for them."
        rejected = [(reason, self._limiter.rejected[reason]) for reason in REASONS]
        yield with_labels(CounterMetricFamily, "requests_rejected", text, ["reason"], rejected)
        for what, totals in (
            ("accepted", stats.num_accepted_tokens_per_pos),
            ("draft", stats.num_draft_tokens_per_pos),
        ):
            name = f"spec_decode_num_{what}_tokens_per_pos"
            text = f"Drafts {'verified' if what == 'draft' else what}, by position and source."
            places = [(n, source, v) for source, vs in totals.items() for n, v in enumerate(vs)]
            yield with_labels(CounterMetricFamily, name, text, ["position", "source"], places)
        name, text = "prefix_cache_evicted", "Prefixes evicted from memory, by reason."
        evicted = stats.prefix_cache.evicted.items()
        yield with_labels(CounterMetricFamily, name, text, ["reason"], evicted)
        text = "Always 1; its labels are the versions of the server and of what it runs on."
        yield with_labels(GaugeMetricFamily, "build_info", text, [*_BUILD], [(*_BUILD.values(), 1)])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_BUILD = {"version": __version__, "python": platform.python_version()}
_BUILD |= {name.replace("-", "_"): _version(name) for name in ("mlx", "mlx-lm")}
