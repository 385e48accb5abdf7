"""/metrics: the promised names, the engine's numbers, and one observation per token."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from mlx_mtp.engine.stats import EngineStats, PrefixCacheStats
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, FakeInfo, answer


def samples(client: Served) -> dict[str, float]:
    """Each sample's name, with its labels, to its value."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_the_engines_counters_under_their_promised_names(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    engine.reported = EngineStats(
        num_requests_running=1,
        num_requests_waiting=2,
        prompt_tokens=3,
        generation_tokens=4,
        num_drafts=5,
        num_draft_tokens=6,
        num_accepted_tokens=7,
        num_accepted_tokens_per_pos=(8, 9),
        depths=((1, 3), (16, 0)),
        parked=True,
        num_restarts=2,
        prefix_cache=PrefixCacheStats(
            queries=10,
            hits=11,
            nbytes=12,
            num_entries=13,
            num_files=14,
            file_nbytes=15,
            num_files_written=16,
            num_files_dropped=17,
        ),
    )
    with serve(engine) as client:
        found = samples(client)
        assert {
            name: value
            for name, value in found.items()
            if "seconds" not in name and "created" not in name
        } == {
            "mlx_mtp:num_requests_running": 1,
            "mlx_mtp:num_requests_waiting": 2,
            "mlx_mtp:num_requests_held": 0,
            "mlx_mtp:engine_restarts_total": 2,
            "mlx_mtp:requests_rejected_total{reason=queue_full}": 0,
            "mlx_mtp:requests_rejected_total{reason=draining}": 0,
            "mlx_mtp:requests_rejected_total{reason=engine}": 0,
            "mlx_mtp:requests_rejected_total{reason=connections}": 0,
            "mlx_mtp:request_timeouts_total": 0,
            "mlx_mtp:prompt_tokens_total": 3,
            "mlx_mtp:generation_tokens_total": 4,
            "mlx_mtp:prefix_cache_queries_total": 10,
            "mlx_mtp:prefix_cache_hits_total": 11,
            "mlx_mtp:prefix_cache_bytes": 12,
            "mlx_mtp:prefix_cache_entries": 13,
            "mlx_mtp:prefix_cache_files": 14,
            "mlx_mtp:prefix_cache_file_bytes": 15,
            "mlx_mtp:prefix_cache_files_written_total": 16,
            "mlx_mtp:prefix_cache_files_dropped_total": 17,
            "mlx_mtp:spec_decode_num_drafts_total": 5,
            "mlx_mtp:spec_decode_num_draft_tokens_total": 6,
            "mlx_mtp:spec_decode_num_accepted_tokens_total": 7,
            "mlx_mtp:spec_decode_num_accepted_tokens_per_pos_total{position=0}": 8,
            "mlx_mtp:spec_decode_num_accepted_tokens_per_pos_total{position=1}": 9,
            "mlx_mtp:spec_decode_depth{batch_size=1}": 3,
            "mlx_mtp:spec_decode_depth{batch_size=16}": 0,
            "mlx_mtp:spec_decode_parked": 1,
        }
        engine.reported = EngineStats(prompt_tokens=30)
        assert samples(client)["mlx_mtp:prompt_tokens_total"] == 30


def test_without_mtp_there_is_no_depth(serve: Serve) -> None:
    engine = FakeEngine(answer([300]), FakeInfo(num_draft_tokens=0, mtp_enabled=False))
    engine.reported = EngineStats(depths=((1, 0),), parked=True)
    with serve(engine) as client:
        found = samples(client)
    assert not [name for name in found if "depth" in name or "parked" in name]


def test_latencies_count_each_sequence_once_and_each_later_token_once(serve: Serve) -> None:
    tokens = [300] * 9
    with serve(FakeEngine(answer(tokens, sizes=(2, 3)))) as client:
        first, between = (
            f"mlx_mtp:{name}_seconds_count"
            for name in ("time_to_first_token", "inter_token_latency")
        )
        assert samples(client)[first] == samples(client)[between] == 0
        body = {"model": MODEL, "prompt": "hi", "n": 2}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        assert usage["completion_tokens"] == 20
        found = samples(client)
        assert found[first] == 2
        # The two tokens of each sequence's first step have no time of their own.
        assert found[between] == 20 - 2 * 2


def test_two_apps_do_not_share_their_metrics(serve: Serve) -> None:
    with serve(FakeEngine(answer([300]))) as one, serve(FakeEngine(answer([300]))) as two:
        one.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
        name = "mlx_mtp:time_to_first_token_seconds_count"
        assert (samples(one)[name], samples(two)[name]) == (1, 0)
