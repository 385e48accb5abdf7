"""`mtp: {"optimistic": X}` and --mtp-optimistic, and what answer, log and banner say of them."""

import logging

import pytest

from tests.support.fake_engine import EOS, FakeEngine, out
from tests.support.in_process import CHAT, GENERATING, GOOD, TEXT, in_process


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("default", "mtp", "expected"),
    [
        (0.0, {}, 0.0),
        (0.0, {"optimistic": 0.4}, 0.4),
        (0.0, {"optimistic": 1}, 1.0),
        (0.3, None, 0.3),
        (0.3, {"optimistic": None}, 0.3),
        (0.3, {"optimistic": 0}, 0.0),
    ],
)
def test_a_request_overrides_the_server(path, default, mtp, expected, caplog) -> None:
    """A response with optimistic acceptance reports the number of such tokens, even 0."""
    caplog.set_level(logging.INFO, "mlx_mtp")
    step = {"num_draft_tokens": 3, "num_accepted_tokens": 2, "optimistic": (1,) if expected else ()}
    engine = FakeEngine(lambda _: iter([out(300, 301, EOS, finish="stop", **step)]))
    with in_process(engine, optimistic=default) as client:
        answered = client.post(path, json=GOOD[path] | {"mtp": mtp, "n": 2}).json()
    assert [r.sampling.optimistic for r in engine.submitted] == [expected] * 2
    assert answered["timings"].get("draft_n_optimistic") == (2 if expected else None)
    (logged,) = (each.args for each in caplog.records if isinstance(each.args, dict))
    assert logged.get("optimistic_tokens") == (2 if expected else None)


def test_the_servers_default_is_for_all_apis() -> None:
    engine = FakeEngine(lambda _: iter([out(EOS, finish="stop")]))
    with in_process(engine, optimistic=0.5) as client:
        for path in GENERATING:
            assert client.post(path, json=GOOD[path]).status_code == 200
    assert [r.sampling.optimistic for r in engine.submitted] == [0.5] * len(GENERATING)


@pytest.mark.parametrize("wrong", [-0.1, 1.5, "0.5", True])
def test_what_is_no_share_is_refused(wrong) -> None:
    with in_process() as client:
        refused = client.post(CHAT, json=GOOD[CHAT] | {"mtp": {"optimistic": wrong}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mtp.optimistic")
