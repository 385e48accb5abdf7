"""`mtp` in a request: what it takes, what it refuses, and where it arrives."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.conftest import MODEL, Serve
from tests.server.fake_engine import FakeEngine, FakeInfo, answer

OFF = FakeInfo(num_draft_tokens=0, mtp_enabled=False)
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}


def post(client: Any, route: str, mtp: Any, **more: Any) -> Any:
    return client.post(route, json={"model": MODEL, "mtp": mtp, **ROUTES[route], **more})


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("mtp", "arrives"),
    [
        (None, None),
        ({}, None),
        ({"num_draft_tokens": None}, None),
        ({"num_draft_tokens": 0}, 0),
        ({"num_draft_tokens": 8}, 8),
    ],
)
def test_it_reaches_every_sequence(serve: Serve, route: str, mtp: Any, arrives: Any) -> None:
    engine = FakeEngine(answer([300]))
    with serve(engine) as client:
        assert post(client, route, mtp, n=2).status_code == 200
    assert [request.num_draft_tokens for request in engine.submitted] == [arrives] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("mtp", "param"),
    [
        ({"num_draft_tokens": -1}, "mtp.num_draft_tokens"),
        ({"num_draft_tokens": 9}, "mtp.num_draft_tokens"),
        ({"num_draft_tokens": 2.5}, "mtp.num_draft_tokens"),
        ({"num_draft_tokens": True}, "mtp.num_draft_tokens"),
        ({"num_draft_tokens": "auto"}, "mtp.num_draft_tokens"),
        ({"num_drafts": 2}, "mtp.num_drafts"),
        (3, "mtp"),
    ],
)
def test_wrong_values_are_named(
    serve: Serve, route: str, mtp: Any, param: str, stream: bool
) -> None:
    engine = FakeEngine(answer([300]))
    with serve(engine) as client:
        response = post(client, route, mtp, stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert not engine.submitted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_without_mtp_only_0_is_possible(serve: Serve, route: str, stream: bool) -> None:
    engine = FakeEngine(answer([300]), OFF)
    with serve(engine) as client:
        refused = post(client, route, {"num_draft_tokens": 2}, stream=stream)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "mtp.num_draft_tokens"
        assert "without MTP" in refused.json()["error"]["message"]
        assert not engine.submitted
        for mtp in ({"num_draft_tokens": 0}, {}, None):
            assert post(client, route, mtp, stream=stream).status_code == 200


def test_the_openai_client_sends_it_as_an_extra(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    with (
        serve(engine) as served,
        openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        hi: Any = [{"role": "user", "content": "hi"}]
        extra = {"mtp": {"num_draft_tokens": 3}}
        client.chat.completions.create(model=MODEL, messages=hi, extra_body=extra)
        client.completions.create(model=MODEL, prompt="hi", extra_body=extra)
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(
                model=MODEL, prompt="hi", extra_body={"mtp": {"num_draft_tokens": 9}}
            )
    assert wrong.value.param == "mtp.num_draft_tokens"
    assert [request.num_draft_tokens for request in engine.submitted] == [3, 3]
