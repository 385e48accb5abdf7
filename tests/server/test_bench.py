"""This server measured by `mlx-mtp bench`: it counts in each chunk, so nothing is estimated."""

import json

from mlx_mtp import cli
from mlx_mtp.bench.report import NOTHING
from tests.bench.test_commands import table_of
from tests.server.fake_engine import FakeEngine, answer


def test_concurrency(serve, capsys, tmp_path):
    written = tmp_path / "a.json"
    few = ("--rounds", "1", "--max-tokens", "64", "--concurrency", "1,3", "--json", str(written))
    with serve(FakeEngine(answer([300] * 99)), api_keys=("k",)) as client:
        command = ["bench", "concurrency", str(client.base_url), *few]
        assert cli.main(command, {"MLX_MTP_API_KEY": "k"}) == 0
    shown = capsys.readouterr().out
    assert NOTHING not in {cell for row in table_of(shown)[1:] for cell in row}
    assert "Note" not in shown
    content = json.loads(written.read_text())
    assert [s["split"] for s in content["summaries"]] == ["told", "told"]
    for found in (found for wave in content["waves"] for found in wave["answers"]):
        assert sum(found["tokens"]) == found["num_tokens"] == 64
        assert len(found["times"]) < 64
        assert found["prompt_tokens"] > 10
        assert 0 < found["num_accepted"] < found["num_drafts"]
