"""Images on two ranks give the same tokens as on one."""

import pytest

from mlx_mtp.models.loader import load_model
from tests.ranks.rank import answers
from tests.support.exchange import led
from tests.support.quick import full
from tests.support.tiny_models import Layout, write_checkpoint
from tests.vision.seeing import make_requests


@pytest.mark.parametrize(
    ("family", "depth", "kind"),
    [
        ("qwen3_5", 2, "sampled images"),
        *(
            full(family, depth, f"{kind} images")
            for family in ("qwen3_5", "qwen3_5_moe")
            for depth in (0, 3, "erratic")
            for kind in ("greedy", "sampled")
        ),
    ],
)
def test_two_ranks_see_as_one(tmp_path, monkeypatch, slowly, ties, family, depth, kind):
    """Two rounds run, the second with prefixes of the first; only rank 0 reads a clock."""
    layout = Layout(family, stacked_experts=family == "qwen3_5_moe", sees=True)
    write_checkpoint(tmp_path, layout)
    models = [load_model(tmp_path, enable_mtp=True, part=(rank, 2)) for rank in range(2)]

    few = kind.startswith("sampled") and depth == 2

    def work(links):
        return answers(models[0], depth, kind, links=links, few=few, pause=1e-6)

    tokens, reused = led(monkeypatch, models, work)
    monkeypatch.undo()
    requests = {each.request_id: each for each in make_requests(kind.split()[0])}
    for name, got in tokens.items():
        ties.check(name, got, slowly(family, requests[name.split()[1]]))
    assert reused > (5 if few else 20)
