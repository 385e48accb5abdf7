"""Web pages, foreign names, and who may use the server at all."""

from __future__ import annotations

import argparse
import hmac
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_mtp.config import ServerConfig
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import host_name, origin, secret
from mlx_mtp.server import auth
from mlx_mtp.server.auth import read_keys
from mlx_mtp.server.hosts import known_names
from mlx_mtp.server.serve import warn_if_open
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, answer
from tests.server.raw_http import error_of, exchange, request_bytes

PAGE = "https://chat.example"
FOREIGN_HOSTS = [
    *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8000"),
    *("", "localhost@evil.example", "evil.example#localhost", "localhost/evil", "[::1", "[x]"),
    *("localhost:x", "127.1", "0x7f000001", "2130706433", "localhost evil", "[::1]evil"),
]
OWN_HOSTS = [
    *("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:1", "[::1]:8000"),
    *("192.168.1.5:8000", "[fe80::1]", "my-mac.local", "MY-MAC.local:8000"),
]


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[Served]:
    engine = FakeEngine(answer([300]))
    with serve(engine, allowed_hosts=("my-mac.local",), cors_origins=(PAGE,)) as client:
        yield client


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/messages"])
def test_foreign_names_are_refused(client: Served, host: str, path: str) -> None:
    refused = exchange(client, request_bytes("GET", path, {"Host": host}))
    assert refused.status in (400, 403)  # 400: h11 takes it for no host at all.
    if refused.status == 403:
        assert "--allowed-host" in error_of(refused, path)


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_own_names_and_addresses_pass(client: Served, host: str) -> None:
    assert exchange(client, request_bytes("GET", "/v1/models", {"Host": host})).status == 200


def test_a_star_lets_every_name_pass(serve: Serve) -> None:
    with serve(FakeEngine(answer([300])), allowed_hosts=("*",)) as client:
        assert exchange(client, request_bytes("GET", "/", {"Host": "evil.example"})).status == 200


def test_a_server_for_the_network_knows_its_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Studio.fritz.box")
    machine = {"studio", "studio.fritz.box", "studio.local"}
    for host in ("0.0.0.0", "::", "192.168.1.5", "studio.fritz.box"):
        assert machine | {"localhost"} <= known_names(host, ())
    for host in ("127.0.0.1", "localhost", "::1"):
        assert not machine & known_names(host, ())
    assert "a.example" in known_names("127.0.0.1", ["a.example"])
    assert "*" not in known_names("0.0.0.0", ())


@pytest.mark.parametrize(
    "page",
    [
        *("https://evil.example", "http://localhost:1", "https://localhost:8000", "null", ""),
        *(
            "file://",
            "http://chat.example",
            f"{PAGE}.evil.example",
            f"{PAGE}:444",
            "app://localhost",
        ),
        *("http://localhost:8000@evil.example", "http://evil.example/http://localhost:8000"),
    ],
)
def test_foreign_pages_are_refused(client: Served, page: str) -> None:
    for method, path in (("POST", "/v1/completions"), ("OPTIONS", "/v1/messages"), ("GET", "/")):
        headers = {
            "Host": "localhost:8123",
            "Origin": page,
            "Access-Control-Request-Method": "POST",
        }
        refused = exchange(client, request_bytes(method, path, headers))
        assert refused.status == 403
        assert "--cors-origin" in error_of(refused, path)
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    ("page", "host"),
    [
        *(("http://localhost:8123", "localhost:8123"), ("http://127.0.0.1", "127.0.0.1")),
        *(("https://my-mac.local", "my-mac.local"), ("http://[::1]:9", "[::1]:9")),
        ("http://LOCALHOST:80", "localhost"),
    ],
)
def test_the_servers_own_pages_pass(client: Served, page: str, host: str) -> None:
    sent = request_bytes("GET", "/v1/models", {"Host": host, "Origin": page})
    assert exchange(client, sent).status == 200


def test_a_page_that_may_is_told_so(serve: Serve) -> None:
    engine = FakeEngine(answer([300]))
    with serve(engine, cors_origins=(PAGE,), api_keys=("k",)) as client:
        preflight = client.options(
            "/v1/chat/completions",
            headers={
                "Origin": PAGE,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
            },
        )
        assert preflight.status_code == 200  # Before it has shown a key: browsers send none here.
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in preflight.headers
        body = {"model": MODEL, "prompt": "hi"}
        for key, status in (("k", 200), ("x", 401)):
            headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
            response = client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status
            # An error too: its page is to read what was wrong.
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "Origin" in response.headers["vary"]


def test_a_star_lets_every_page_pass(serve: Serve) -> None:
    with serve(FakeEngine(answer([300])), cors_origins=("*",)) as client:
        for page in ("https://any.example", "null"):
            response = client.get("/v1/models", headers={"Origin": page})
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "*"


def test_without_cors_origins_no_page_is_told_anything(serve: Serve) -> None:
    with serve(FakeEngine(answer([300]))) as client:
        assert client.get("/v1/models", headers={"Origin": PAGE}).status_code == 403
        assert "access-control-allow-origin" not in client.get("/v1/models").headers


@pytest.mark.parametrize(
    "value", ["a.example:80", "http://a.example", "a b", "", "-", "*.a", "[::1]"]
)
def test_names_that_are_none(value: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        host_name(value)


@pytest.mark.parametrize(
    "value", ["null", "a.example", "https://a.example/", "https://", "a b", "*."]
)
def test_origins_that_are_none(value: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        origin(value)


def test_names_and_origins_are_brought_to_one_form() -> None:
    assert host_name("My-Mac.Local.") == "my-mac.local"
    assert origin("HTTPS://Chat.Example:8443") == "https://chat.example:8443"
    assert origin("app://obsidian.md") == "app://obsidian.md"
    assert host_name("*") == origin("*") == "*"


def test_several_keys(serve: Serve) -> None:
    with serve(FakeEngine(answer([300])), api_keys=("first", "sécond")) as client:
        for key, status in (("first", 200), ("sécond", 200), ("third", 401), ("firstsécond", 401)):
            for name, value in (("x-api-key", key), ("authorization", f"Bearer {key}")):
                response = client.get("/v1/models", headers={name: value.encode()})
                assert response.status_code == status


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_cve_2025_59425_the_time_tells_nothing_of_a_key(
    serve: Serve, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM compared keys with `==`, whose time tells how many characters are right."""
    compared: list[tuple[bytes, bytes]] = []

    def noting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac_compare(one, other)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", noting)
    keys = ("first", "second", "third")
    with serve(FakeEngine(answer([300])), api_keys=keys) as client:
        counts = set()
        for given in ("first", "second", "third", "fourth", "f", "", "x" * 5000):
            compared.clear()
            value = given if header == "x-api-key" else f"Bearer {given}".strip()
            status = client.get("/v1/models", headers={header: value}).status_code
            assert status == (200 if given in keys else 401)
            counts.add(len(compared))
            # By digests of one length: not even a key's length shows.
            assert {len(side) for pair in compared for side in pair} == {32}
        assert counts == {2 * len(keys)}, "each key is compared, whichever was right"


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the laptop\nsk-one\n\n  sk-two \r\n#sk-three\nsk-one\n")
    file.chmod(0o600)
    assert read_keys(None, str(file)) == ("sk-one", "sk-two")
    assert read_keys("sk-zero", str(file)) == ("sk-zero", "sk-one", "sk-two")
    assert read_keys("sk-zero", None) == ("sk-zero",)
    assert read_keys(None, None) == ()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no key"),
        (b"# only this\n", "no key"),
        (b"\xff", "UTF-8"),
        (b"ok\na\x01b\n", "line 2"),
    ],
)
def test_files_without_keys(tmp_path: Path, content: bytes, word: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=word):
        read_keys(None, str(file))
    with pytest.raises(UsageError, match="can't be read"):
        read_keys(None, str(tmp_path / "missing"))


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_file_that_others_can_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one\n")
    for mode, told in ((0o600, False), (0o640, False), (0o644, True)):
        caplog.clear()
        file.chmod(mode)
        read_keys(None, str(file))
        assert ("chmod 600" in caplog.text) is told
        assert "sk-one" not in caplog.text


@pytest.mark.parametrize("key", ["", " a", "a\n", "a\x00b", "sk-sec\udcff"])
def test_a_key_that_no_client_can_send_is_not_repeated(key: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        secret(key)
    assert "sk-sec" not in str(caught.value)


def test_keys_are_in_no_log_and_no_error(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-very-secret"
    caplog.set_level(logging.DEBUG)
    with serve(FakeEngine(answer([300])), api_keys=(key,)) as client:
        for name, value in (("Authorization", f"Bearer {key}"), ("x-api-key", key)):
            for sent in (
                request_bytes("GET", "/v1/models", {name: value}),
                request_bytes("GET", "/v1/models", {name: value + "x"}),
                request_bytes("GET", "/no/such/route", {name: value}),
                request_bytes("POST", "/v1/completions", {name: value}, b"{"),
                request_bytes("GET", "/v1/models", {f"{name} ": value}),
            ):
                assert key.encode() not in exchange(client, sent).body
    assert key not in caplog.text
    assert key not in repr(ServerConfig("m", api_keys=(key,)))


def test_who_can_use_an_open_server_is_told(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_open("127.0.0.1", (), has_key=False)
    warn_if_open("localhost", (PAGE,), has_key=False)
    warn_if_open("0.0.0.0", ("*",), has_key=True)
    assert not caplog.records
    warn_if_open("0.0.0.0", (), has_key=False)
    assert "0.0.0.0" in caplog.text
    assert "--api-key" in caplog.text
    caplog.clear()
    warn_if_open("::1", ("*",), has_key=False)
    assert "web page" in caplog.text


def test_without_a_key_little_is_told(serve: Serve) -> None:
    with serve(FakeEngine(answer([300])), api_keys=("k",)) as client:
        assert client.get("/").json() == {"name": "mlx-mtp"}
        assert client.head("/").status_code == 200
        assert client.get("/health").json() == {"status": "ok"}
        for path in ("/metrics", "/v1/models", "/health/x", "/%2e/health", "/health//"):
            assert client.get(path).status_code == 401
        for path in (
            "//health",
            "/x/../health",
            "http://localhost/health",
            "/health?x",
            "/%68ealth",
        ):
            status = exchange(client, request_bytes("GET", path)).status
            assert status == (200 if path in ("/health?x", "/%68ealth") else 401)
