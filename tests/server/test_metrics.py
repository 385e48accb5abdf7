"""/metrics: the promised names, the engine's numbers, and one observation per token."""

import json

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mlx_mtp.engine.stats import EngineStats, PrefixCacheStats
from tests.server.fake_engine import FakeEngine, FakeInfo, answer
from tests.server.in_process import GOOD, TEXT, in_process


def samples(client: httpx.Client) -> dict[str, float]:
    """Each sample's name, with its labels, to its value."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


PREFIXES = json.loads("""{
    "queries": 10, "hits": 11, "nbytes": 12, "num_entries": 13, "num_files": 14, "file_nbytes": 15,
    "num_files_written": 16, "num_files_dropped": 17
}""")
STATS = json.loads("""{
    "num_requests_running": 1, "num_requests_waiting": 2, "prompt_tokens": 3, "num_restarts": 18,
    "generation_tokens": 4, "num_drafts": 5, "num_draft_tokens": 6, "num_accepted_tokens": 7,
    "num_accepted_tokens_per_pos": [8, 9], "depths": [[1, 3], [16, 0]], "parked": true
}""")
REASONS = ("queue_full", "draining", "engine", "connections")
PROMISED = {f"requests_rejected_total{{reason={reason}}}": 0 for reason in REASONS} | {
    "num_requests_running": 1,
    "num_requests_waiting": 2,
    "num_requests_held": 0,
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
    "spec_decode_num_accepted_tokens_per_pos_total{position=0}": 8,
    "spec_decode_num_accepted_tokens_per_pos_total{position=1}": 9,
    "spec_decode_depth{batch_size=1}": 3,
    "spec_decode_depth{batch_size=16}": 0,
    "spec_decode_parked": 1,
}


def test_the_engines_counters_under_their_promised_names() -> None:
    for info in (FakeInfo(), FakeInfo(num_draft_tokens=0, mtp_enabled=False)):
        engine = FakeEngine(answer([300]), info)
        engine.reported = EngineStats(**STATS, prefix_cache=PrefixCacheStats(**PREFIXES))
        with in_process(engine) as client:
            found = samples(client)
            found = {n: v for n, v in found.items() if "seconds" not in n and "created" not in n}
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
    # Two apps do not share their metrics.
    with in_process(engine) as client, in_process() as other:
        assert samples(client)[first] == samples(client)[between] == 0
        usage = client.post(TEXT, json=GOOD[TEXT] | {"n": 2}).json()["usage"]
        assert usage["completion_tokens"] == 20
        found = samples(client)
        assert found[first] == 2
        # The two tokens of each sequence's first step have no time of their own.
        assert found[between] == 20 - 2 * 2
        assert samples(other)[first] == 0
