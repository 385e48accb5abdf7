"""/metrics: the promised names, the engine's numbers, and one observation per token."""

import asyncio
import json
import re
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_mtp.engine.request import PrefillProgress
from mlx_mtp.engine.stats import EngineStats
from mlx_mtp.prefix.policy import PrefixCacheStats
from mlx_mtp.server.generation.generation import Dispatcher, Generation
from mlx_mtp.server.http import body
from mlx_mtp.server.metrics import HISTOGRAMS, Metrics
from tests.server.conftest import MODEL
from tests.support.fake_engine import FakeEngine, FakeInfo, answer, out
from tests.support.in_process import CHAT, GENERATING, GOOD, TEXT, in_process


def samples(client: httpx.Client) -> dict[str, float]:
    """Returns each sample's value by its name and labels, without the model's name."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert (sample.labels.pop("model_name", None) == MODEL) == (":" in sample.name)
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


PREFIXES = json.loads("""{
    "queries": 10, "hits": 11, "nbytes": 12, "num_entries": 13, "num_files": 14, "file_nbytes": 15,
    "num_files_written": 16, "num_files_dropped": 17
}""")
STATS = json.loads("""{
    "num_requests_running": 1, "num_requests_waiting": 2, "prompt_tokens": 3, "num_restarts": 18,
    "kv_usage": 0.25,
    "generation_tokens": 4, "num_draft_windows": 5, "num_draft_tokens": 6, "num_accepted_tokens": 7,
    "num_optimistic_tokens": 19,
    "num_accepted_tokens_per_pos": {"mtp": [8, 9], "copy": [4]},
    "depths": [[1, 3], [16, 0]], "parked": true
}""")
STATS["prefills"] = {"a": PrefillProgress(50, 0, 20, 0.0), "b": PrefillProgress(1, 0, 1, 0.0)}
REASONS = ("queue_full", "draining", "engine", "connections", "bytes")
PROMISED = {f"requests_rejected_total{{reason={reason}}}": 0 for reason in REASONS} | {
    "num_requests_running": 1,
    "num_requests_waiting": 2,
    "num_requests_held": 0,
    "prefill_tokens": 51,
    "prefill_tokens_done": 21,
    "kv_cache_usage_perc": 0.25,
    "engine_restarts_total": 18,
    "request_timeouts_total": 0,
    "prompt_tokens_total": 3,
    "generation_tokens_total": 4,
    "prefix_cache_queries_total": 10,
    "prefix_cache_hits_total": 11,
    "prefix_cache_bytes": 12,
    "prefix_cache_entries": 13,
    "prefix_cache_files": 14,
    "prefix_cache_file_bytes": 15,
    "prefix_cache_files_written_total": 16,
    "prefix_cache_files_dropped_total": 17,
    "spec_decode_num_drafts_total": 5,
    "spec_decode_num_draft_tokens_total": 6,
    "spec_decode_num_accepted_tokens_total": 7,
    "spec_decode_num_optimistic_tokens_total": 19,
    "spec_decode_num_accepted_tokens_per_pos_total{position=0,source=mtp}": 8,
    "spec_decode_num_accepted_tokens_per_pos_total{position=1,source=mtp}": 9,
    "spec_decode_num_accepted_tokens_per_pos_total{position=0,source=copy}": 4,
    "spec_decode_depth{batch_size=1}": 3,
    "spec_decode_depth{batch_size=16}": 0,
    "spec_decode_parked": 1,
}


def test_the_engines_counters_under_their_promised_names() -> None:
    for info in (FakeInfo(), FakeInfo(num_draft_tokens=0, mtp_enabled=False, draft_sources=())):
        engine = FakeEngine(answer([300]), info)
        engine.reported = EngineStats(**STATS, prefix_cache=PrefixCacheStats(**PREFIXES))
        with in_process(engine) as client:
            found = samples(client)
            observed = "process_|build_info|http_requests|" + "|".join(HISTOGRAMS)
            found = {n: v for n, v in found.items() if not re.search(observed, n)}
            assert found == {
                f"mlx_mtp:{name}": value
                for name, value in PROMISED.items()
                if info.mtp_enabled or ("depth" not in name and "parked" not in name)
            }
            engine.reported = EngineStats(prompt_tokens=30)
            assert samples(client)["mlx_mtp:prompt_tokens_total"] == 30


def test_latencies_count_each_sequence_once_and_each_later_token_once() -> None:
    first, between = (
        f"mlx_mtp:{name}_seconds_count" for name in ("time_to_first_token", "inter_token_latency")
    )
    engine = FakeEngine(answer([300] * 9, sizes=(2, 3)))
    # Two applications share no metrics.
    with in_process(engine) as client, in_process() as other:
        assert samples(client)[first] == samples(client)[between] == 0
        usage = client.post(TEXT, json=GOOD[TEXT] | {"n": 2}).json()["usage"]
        assert usage["completion_tokens"] == 20
        found = samples(client)
        assert found[first] == 2
        # The two tokens of each sequence's first step have no inter-token latency.
        assert found[between] == 20 - 2 * 2
        assert samples(other)[first] == 0


def test_only_the_event_loop_counts_and_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads that work on a request, as on a large body, neither count nor dispatch."""
    called, elsewhere = set(), set()
    names = [(Metrics, "observe"), (Metrics, "count"), (Metrics, "count_ignored")]
    names += [(Generation, "__enter__"), (Dispatcher, "cancel"), (Dispatcher, "_dispatch")]

    def watch(owner: type, name: str) -> None:
        usual = getattr(owner, name)

        def call(*given: object) -> None:
            called.add(name)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                elsewhere.add(name)
            usual(*given)

        monkeypatch.setattr(owner, name, call)

    for owner, name in names:
        watch(owner, name)
    monkeypatch.setattr(body, "LARGE_BODY", 0)
    with in_process(FakeEngine(answer([300] * 3))) as client:
        for path in GENERATING:
            for more in ({}, {"stream": True}, {"another": 1}):
                assert client.post(path, json=GOOD[path] | more).is_success, (path, more)
        for path in (CHAT, TEXT):
            asked = GOOD[path] | {"prompt_logprobs": 2, "n": 2}
            # With one token, the only step is also the last one.
            for most in (1, 9):
                assert client.post(path, json=asked | {"max_tokens": most}).is_success
        echoed = {"echo": True, "logprobs": 1, "stream": True}
        assert client.post(TEXT, json=GOOD[TEXT] | echoed).is_success
    assert called == {name for _, name in names}
    assert not elsewhere


# Metrics in vLLM's own Grafana dashboard, without those of swapping, which we don't do.
DASHBOARD = [
    "e2e_request_latency_seconds_bucket",
    "generation_tokens_total",
    "gpu_cache_usage_perc",
    "inter_token_latency_seconds_bucket",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket",
    "request_prefill_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_success_total",
    "time_per_output_token_seconds_bucket",
    "time_to_first_token_seconds_bucket",
]


def test_vllms_names_where_they_mean_the_same_and_only_if_asked_for() -> None:
    for wanted in (False, True):
        engine = FakeEngine(answer([300] * 4))
        engine.reported = EngineStats(**STATS, prefix_cache=PrefixCacheStats(**PREFIXES))
        with in_process(engine, vllm_metrics=wanted) as client:
            client.post(TEXT, json=GOOD[TEXT])
            found = samples(client)
            twins = {name: value for name, value in found.items() if name.startswith("vllm:")}
            assert {name.partition("{")[0] for name in twins} >= {
                f"vllm:{name}" for name in DASHBOARD if wanted
            }
            old = {"time_per_output_token": "inter_token_latency", "gpu_cache": "kv_cache"}
            for name, value in twins.items():
                for before, now in old.items():
                    name = name.replace(f":{before}", f":{now}")
                assert found[name.replace("vllm:", "mlx_mtp:", 1)] == value
            assert bool(twins) == wanted


def test_the_times_of_a_request_add_up() -> None:
    """The engine reports the time of admission; each reason to finish is counted by its name."""

    def script(request):
        time.sleep(0.02)
        admitted = time.perf_counter()
        time.sleep(0.03)
        yield out(300, admitted_at=admitted)
        time.sleep(0.05)
        yield out(300, finish="length")

    with in_process(FakeEngine(script)) as client:
        usage = client.post(TEXT, json=GOOD[TEXT]).json()["usage"]
        found = samples(client)
        queue, prefill, decode, first, whole, prompt, tokens = (
            found[f"mlx_mtp:{name}_sum"]
            for name in (
                *(f"request_{part}_time_seconds" for part in ("queue", "prefill", "decode")),
                *("time_to_first_token_seconds", "e2e_request_latency_seconds"),
                *("request_prompt_tokens", "request_generation_tokens"),
            )
        )
        assert queue >= 0.02 and prefill >= 0.03 and queue + prefill == pytest.approx(first)
        assert first + decode == pytest.approx(whole) and decode >= 0.05
        assert (prompt, tokens) == (usage["prompt_tokens"], 2)
        assert found["mlx_mtp:request_success_total{finished_reason=length}"] == 1


def test_http_status_by_route_has_no_series_that_a_client_can_choose() -> None:
    with in_process(api_keys=("k",)) as client:
        key = {"x-api-key": "k"}
        client.post(CHAT, json={})
        client.post(CHAT, json={"messages": 1}, headers=key)
        client.get("/v1/models/a/b", headers=key)
        for number in range(3):
            client.get(f"/made/up/{number}", headers=key)
        text = client.get("/metrics", headers=key).text
    labels = re.findall(r'http_requests_total{.*route="(.*)",status="(.*)"} (.*)', text)
    assert set(labels) == {
        (CHAT, "401", "1.0"),
        (CHAT, "400", "1.0"),
        ("/v1/models/{model_id:path}", "404", "1.0"),
        ("other", "404", "3.0"),
    }
