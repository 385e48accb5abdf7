"""--api-key: every route but /health wants it, and wants it whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, answer

KEY = "sésame-123"
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/metrics"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/no/such/route"),
    ("GET", "/healthy"),
]


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[Served]:
    with serve(FakeEngine(answer([300])), api_keys=(KEY,)) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer x", "Bearer sésame-12", "Bearer sésame-1234", "Basic " + KEY, KEY],
)
def test_without_the_key_nothing_opens(
    client: Served, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    response = client.request(method, path, headers=headers)
    assert response.status_code == 401
    error = response.json()["error"]
    assert error["code"] == "invalid_api_key"
    assert error["type"] == "authentication_error"
    assert KEY not in response.text
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_with_the_key_everything_opens(client: Served, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {KEY}".encode()}
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.get("/metrics", headers=headers).status_code == 200
    assert client.get("/no/such/route", headers=headers).status_code == 404
    body = {"model": MODEL, "prompt": "hi"}
    assert client.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_health_is_open(client: Served) -> None:
    assert client.get("/health").status_code == 200
