"""Who may call the server: keys, host names, web pages."""

import argparse
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_mtp.config import ServerConfig
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import host_name, origin, secret
from mlx_mtp.server.http import access
from mlx_mtp.server.http.access import known_names, read_keys, warn_if_open
from tests.support.fake_engine import FakeEngine, answer
from tests.support.in_process import GOOD, TEXT, in_process
from tests.support.raw_http import error_of

PAGE = "https://chat.example"
KEY, OTHER = "sésame-123", "another-key"
FOREIGN_HOSTS = [
    *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8000"),
    *("", "localhost@evil.example", "evil.example#localhost", "localhost/evil", "[::1", "[x]"),
    *("localhost:x", "127.1", "0x7f000001", "2130706433", "localhost evil", "[::1]evil", "."),
    *("evillocalhost", "evil.localhost", "evilmy-mac.local", "evil.my-mac.local:8000", "local"),
]
OWN_HOSTS = [
    *("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:1", "[::1]:8000"),
    *("192.168.1.5:8000", "[fe80::1]", "my-mac.local", "MY-MAC.local:8000"),
]
FOREIGN_PAGES = [
    *("https://evil.example", "http://localhost:1", "https://localhost:8000", "null", "file://"),
    *("", "http://chat.example", f"{PAGE}.evil.example", f"{PAGE}:444", "app://localhost"),
    *("http://localhost:8000@evil.example", "http://evil.example/http://localhost:8000"),
    *("http://evillocalhost:8123", "https://evilchat.example", "https://evil.chat.example"),
]
OWN_PAGES = [
    *(("http://localhost:8123", "localhost:8123"), ("http://127.0.0.1", "127.0.0.1")),
    *(("https://my-mac.local", "my-mac.local"), ("http://[::1]:9", "[::1]:9")),
    *(("http://LOCALHOST:80", "localhost"), (PAGE, "localhost")),
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with in_process(allowed_hosts=("my-mac.local",), cors_origins=(PAGE,)) as client:
        yield client


@pytest.fixture(scope="module")
def locked() -> Iterator[httpx.Client]:
    with in_process(api_keys=(KEY, OTHER), cors_origins=(PAGE,)) as client:
        yield client


def test_cve_2024_28224_ollama_foreign_names_are_refused(client: httpx.Client) -> None:
    """A page whose name resolves to 127.0.0.1 (DNS rebinding) counted as one of the same origin."""
    name = "rebound.example:8000"
    for headers in ({"Host": name}, {"Host": name, "Origin": f"http://{name}"}):
        assert client.post(TEXT, json=GOOD[TEXT], headers=headers).status_code == 403
    for path in ("/health", "/v1/messages"):
        for host in FOREIGN_HOSTS:
            refused = client.get(path, headers={"Host": host})
            assert "--allowed-host" in error_of(refused, path, 403)
    for host in OWN_HOSTS:
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200, host


def test_a_server_for_the_network_knows_its_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Studio.fritz.box")
    machine = {"studio", "studio.fritz.box", "studio.local"}
    for host in ("0.0.0.0", "::", "192.168.1.5", "studio.fritz.box"):
        assert known_names(host, ()) == machine | {"localhost", host}
    for host in ("127.0.0.1", "localhost", "::1"):
        assert known_names(host, ["a.example"]) == {"localhost", host, "a.example"}


def test_foreign_pages_are_refused_and_own_ones_pass(client: httpx.Client) -> None:
    for page in FOREIGN_PAGES:
        for method, path in (("POST", TEXT), ("OPTIONS", "/v1/messages"), ("GET", "/")):
            headers = {"Host": "localhost:8123", "Origin": page}
            headers["Access-Control-Request-Method"] = "POST"
            headers["Access-Control-Request-Private-Network"] = "true"
            refused = client.request(method, path, headers=headers)
            assert "--cors-origin" in error_of(refused, path, 403)
            assert not any(name.startswith("access-control-allow") for name in refused.headers)
    for page, host in OWN_PAGES:
        own = client.get("/v1/models", headers={"Host": host, "Origin": page})
        assert own.status_code == 200, page
    two = [("Origin", PAGE), ("Origin", PAGE)]
    assert client.get("/v1/models", headers=two).status_code == 403


def test_a_page_that_may_can_read_answers_and_errors(locked: httpx.Client) -> None:
    headers = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    preflight = locked.options(TEXT, headers=headers)
    assert preflight.status_code == 200  # without a key: browsers send none in a preflight
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    assert "access-control-allow-private-network" not in preflight.headers
    # Chrome adds this header if the page is on the internet and the server is not.
    headers["Access-Control-Request-Private-Network"] = "true"
    preflight = locked.options(TEXT, headers=headers)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert preflight.headers["access-control-allow-private-network"] == "true"
    for key, status in ((OTHER, 200), ("x", 401)):
        headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
        response = locked.post(TEXT, json=GOOD[TEXT], headers=headers)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "Origin" in response.headers["vary"]


def test_stars_open_to_all_and_without_flags_nothing_is() -> None:
    with in_process(cors_origins=("*",), allowed_hosts=("*",)) as client:
        for page in ("https://any.example", "null"):
            headers = {"Host": "evil.example", "Origin": page}
            response = client.get("/v1/models", headers=headers)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "*"
    with in_process() as client:
        assert client.get("/v1/models", headers={"Origin": PAGE}).status_code == 403
        assert "access-control-allow-origin" not in client.get("/v1/models").headers


BAD_NAMES = ["a.example:80", "http://a.example", "a b", "", "-", "*.a", "[::1]"]
BAD_ORIGINS = ["null", "a.example", "https://a.example/", "https://", "a b", "*."]
BAD_KEYS = ["", " a", "a\n", "a\x00b", "sk-sec\udcff"]


def test_values_of_flags() -> None:
    for kind, values in ((host_name, BAD_NAMES), (origin, BAD_ORIGINS), (secret, BAD_KEYS)):
        for value in values:
            with pytest.raises(argparse.ArgumentTypeError) as caught:
                kind(value)
            assert "sk-sec" not in str(caught.value)  # no error repeats a key
    assert host_name("My-Mac.Local.") == "my-mac.local"
    assert origin("HTTPS://Chat.Example:8443") == "https://chat.example:8443"
    assert origin("app://obsidian.md") == "app://obsidian.md"
    assert host_name("*") == origin("*") == "*"


NO_ROUTES = ["/no/such/route", "/v1/messages/x", "/v1/messages/batches/1/"]
ROUTES = ["/v1/models", "/v1/models/test/model", "/metrics", TEXT, "/v1/messages", *NO_ROUTES]
WRONG = ["", "Bearer", "Bearer x", f"Bearer {KEY[:-1]}", f"Bearer {KEY}4", f"Basic {KEY}", KEY]
OPEN = {"/": 200, "/health": 200, "/health/": 200, "/health?x": 200, "/%68ealth": 200}
CLOSED = ["/healthy", "/health/x", "/health//", "//health", "/%2e/health", "/metrics"]


def test_without_a_valid_key_nothing_opens_but_health(
    locked: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "mlx_mtp")
    headers: list[dict[str, Any]] = [{}, {"x-api-key": "x"}]
    headers += [{"Authorization": wrong.encode()} for wrong in WRONG]
    for path in ROUTES:
        for given in headers:
            for method in ("GET", "POST"):
                response = locked.request(method, path, headers=given)
                assert KEY not in response.text
                assert response.headers["www-authenticate"] == "Bearer"
                error_of(response, path, 401)
                assert response.json()["error"]["type"] == "authentication_error"
    for path, status in {**OPEN, **dict.fromkeys(CLOSED, 401)}.items():
        url = httpx.URL("http://localhost", raw_path=path.encode())
        assert locked.get(url).status_code == status, path
    assert locked.get("/").json() == {"name": "mlx-mtp"}
    assert locked.head("/").status_code == 200
    assert locked.get("/health").json() == {"status": "ok"}
    for key in (KEY, OTHER):
        given = [("authorization", f"{scheme} {key}") for scheme in ("Bearer", "bearer", "BEARER")]
        for name, value in [*given, ("x-api-key", key)]:
            own = {name: value.encode()}
            for path in ("/v1/models", "/v1/models/", "/metrics"):
                assert locked.get(path, headers=own).status_code == 200
            assert key not in locked.post(TEXT, content=b"{", headers=own).text
            assert locked.post(TEXT, json=GOOD[TEXT], headers=own).status_code == 200
    assert KEY not in caplog.text
    assert KEY not in repr(ServerConfig("m", api_keys=(KEY,)))


def test_cve_2025_59425_the_time_tells_nothing_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM compared keys with `==`, whose time shows how many characters are right."""
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(
        access.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b
    )
    keys = ("first", "second", "third")
    with in_process(api_keys=keys) as client:
        for given in (*keys, "fourth", "f", "", "x" * 5000):
            compared.clear()
            status = client.get("/v1/models", headers={"x-api-key": given}).status_code
            assert status == (200 if given in keys else 401)
            assert len(compared) == 2 * len(keys), "each key is compared, whichever was right"
            # Digests of equal length are compared: not even a key's length shows.
            assert {len(side) for pair in compared for side in pair} == {32}


def test_keys_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    with pytest.raises(UsageError, match="can't be read"):
        read_keys(None, str(file))
    for content, word in (
        *((b"", "no key"), (b"# only this\n", "no key"), (b"\xff", "UTF-8")),
        (b"ok\na\x01b\n", "line 2"),
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=word):
            read_keys(None, str(file))
    file.write_text("# of the laptop\nsk-one\n\n  sk-two \r\n#sk-three\nsk-one\n")
    for mode, warned in ((0o640, False), (0o644, True)):
        caplog.clear()
        file.chmod(mode)
        assert read_keys(None, str(file)) == ("sk-one", "sk-two")
        assert ("chmod 600" in caplog.text) is warned
        assert "sk-one" not in caplog.text
    assert read_keys("sk-zero", str(file)) == ("sk-zero", "sk-one", "sk-two")


def test_an_open_server_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    for host, origins, has_key, word in (
        *(("localhost", (PAGE,), False, ""), ("0.0.0.0", ("*",), True, "")),
        *(("0.0.0.0", (), False, "--api-key"), ("::1", ("*",), False, "web page")),
    ):
        caplog.clear()
        warn_if_open(host, origins, has_key=has_key)
        assert bool(caplog.records) == bool(word)
        assert word in caplog.text


def test_keys_share_no_prefixes_unless_they_may() -> None:
    def salts(*keys: str, **settings: Any) -> list[str]:
        engine = FakeEngine(answer([300]))
        with in_process(engine, api_keys=keys, **settings) as client:
            for key, fields in itertools.product(keys, ({}, {"cache_salt": "x"})):
                asked = GOOD[TEXT] | fields
                client.post(TEXT, json=asked, headers={"x-api-key": key}).raise_for_status()
        return [request.options.cache_salt for request in engine.submitted]

    assert len(set(salts("one", OTHER))) == 4
    assert salts(OTHER) == ["", "x"]
    assert salts("one", OTHER, share_prefixes=True) == ["", "x"] * 2
