"""The depth of a real server on the bundled model: `auto`, and what requests ask for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.process import Server, running
from tests.test_server_process import QUESTIONS, STORY, ask, stream


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """One that follows costs, with little time to measure them first, and one without MTP."""
    with running("--enable-mtp", "--calibration-seconds", "0.5") as first, running() as second:
        yield {"auto": first, "off": second}


def timings(server: Server, **body: object) -> dict[str, float]:
    message = {"role": "user", "content": STORY}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "mlx-mtp-demo", "messages": [message], "temperature": 0, **body},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["timings"]


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, pytest.param({"temperature": 1.0, "seed": 5}, marks=pytest.mark.full)],
    ids=["greedy", "seeded"],
)
def test_auto_gives_the_answers_of_plain_decoding(servers, options):
    """Sixteen at once; every fourth asks for a depth of its own, or for none."""
    alone = {q: ask(servers["off"], q, **options) for q in QUESTIONS}
    extras = [None, {"mtp": {"num_draft_tokens": 0}}, None, {"mtp": {"num_draft_tokens": 4}}]
    with ThreadPoolExecutor(16) as pool:
        for way in (ask, stream):
            jobs = [
                (q, pool.submit(way, servers["auto"], q, extra_body=extra, **options))
                for q in QUESTIONS
                for extra in extras
            ]
            for question, job in jobs:
                assert job.result() == alone[question]


def test_the_depth_is_told_in_the_metrics(servers):
    timings(servers["auto"], max_tokens=40)
    text = httpx.get(f"{servers['auto'].url}/metrics", timeout=60).text
    assert 'mlx_mtp:spec_decode_depth{batch_size="1"}' in text
    assert servers["auto"].metric("spec_decode_parked") in (0.0, 1.0)
    plain = httpx.get(f"{servers['off'].url}/metrics", timeout=60).text
    assert "spec_decode_depth" not in plain


def test_a_request_chooses_its_own_depth(servers):
    none = timings(servers["auto"], max_tokens=40, mtp={"num_draft_tokens": 0})
    assert none["draft_n"] == 0
    for depth in (1, 5):
        some = timings(servers["auto"], max_tokens=40, mtp={"num_draft_tokens": depth})
        assert some["draft_n"] > 0
        # Each window but the last, which the answer's end may cut, accepts some of so many.
        assert some["draft_n"] % depth == 0
        assert some["draft_n_accepted"] > 0


def test_the_sdk_and_a_server_without_mtp(servers):
    wanted = {"mtp": {"num_draft_tokens": 2}}
    assert ask(servers["auto"], STORY, extra_body=wanted)
    assert ask(servers["off"], STORY, extra_body={"mtp": {"num_draft_tokens": 0}})
    for way in (ask, stream):
        with pytest.raises(openai.BadRequestError, match="without MTP") as refused:
            way(servers["off"], STORY, extra_body=wanted)
        assert refused.value.param == "mtp.num_draft_tokens"
        with pytest.raises(openai.BadRequestError) as refused:
            way(servers["auto"], STORY, extra_body={"mtp": {"num_draft_tokens": 9}})
        assert refused.value.param == "mtp.num_draft_tokens"
