"""A real Prometheus reads /metrics, and promtool reports only the faults noted here."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlx_mtp.server.serving import bind
from tests.support.process import CHAT, MODEL, running

# Prometheus reserves colons for recording rules, but vLLM's dashboards expect these names.
NOTED = "metric names should not contain ':'"


def programs(folder: Path) -> Path:
    """Returns the folder of prometheus and promtool; unpacks Debian's package if needed."""
    if (installed := shutil.which("promtool")) and shutil.which("prometheus"):
        return Path(installed).parent
    if shutil.which("apt-get") is None:
        pytest.skip("prometheus is not installed")
    for argv in (["apt-get", "download", "prometheus"], ["sh", "-c", "dpkg -x *.deb ."]):
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"prometheus can't be had: {done.stderr[-200:]}")
    return folder / "usr" / "bin"


def dashboard() -> Iterator[str]:
    """Yields the queries of docs/grafana.json."""
    found = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text())
    for panel in found["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")


@pytest.mark.full
def test_prometheus_reads_the_metrics_and_promtool_finds_nothing_new(tmp_path: Path) -> None:
    found = programs(tmp_path)
    with running("--vllm-metrics", "--mtp-num-draft-tokens", "2") as server:
        message = {"role": "user", "content": "Tell me a story."}
        assert server.post(CHAT, messages=[message], max_tokens=20).status_code == 200
        text = server.http.get("/metrics").text
        checked = subprocess.run(
            [found / "promtool", "check", "metrics"], input=text, capture_output=True, text=True
        )
        remarks = (checked.stdout + checked.stderr).splitlines()
        assert [remark for remark in remarks if not remark.endswith(NOTED)] == []
        target = server.url.removeprefix("http://")
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": []}
        config["scrape_configs"] = [{"job_name": "m", "static_configs": [{"targets": [target]}]}]
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is valid YAML
        with bind("127.0.0.1", 0) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        flags = ["--config.file=prometheus.yml", f"--web.listen-address={address}"]
        process = subprocess.Popen(
            [found / "prometheus", *flags], cwd=tmp_path, stderr=subprocess.DEVNULL
        )
        try:
            query = f'vllm:request_success_total{{model_name="{MODEL}"}}'
            with httpx.Client(transport=httpx.HTTPTransport(retries=10)) as client:
                for _ in range(120):
                    url = f"http://{address}/api/v1/query"
                    # Until Prometheus has started, the answer is a 503 without JSON.
                    answer = client.get(url, params={"query": query})
                    if answer.is_success and (result := answer.json()["data"]["result"]):
                        break
                    time.sleep(0.5)
                (series,) = result
                assert series["metric"]["finished_reason"] == "length" and series["value"][1] == "1"
                # All queries of the dashboard have a result: a rate needs two samples.
                time.sleep(3)
                for expression in dashboard():
                    answer = client.get(url, params={"query": expression}).json()
                    assert answer["status"] == "success", expression
                    quiet = "evicted" in expression or "requests_rejected" in expression
                    assert answer["data"]["result"] or quiet, expression
        finally:
            process.kill()
            process.wait()
