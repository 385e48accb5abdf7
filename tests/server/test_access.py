"""Who may call the server: keys, host names, web pages."""

from __future__ import annotations

import argparse
import hmac
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from mlx_mtp.config import ServerConfig
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import host_name, origin, secret
from mlx_mtp.server import auth
from mlx_mtp.server.auth import read_keys
from mlx_mtp.server.hosts import known_names
from mlx_mtp.server.serve import warn_if_open
from tests.server.in_process import GOOD, TEXT, in_process
from tests.server.raw_http import error_of

PAGE = "https://chat.example"
KEY, OTHER = "sésame-123", "first"
FOREIGN_HOSTS = [
    *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8000"),
    *("", "localhost@evil.example", "evil.example#localhost", "localhost/evil", "[::1", "[x]"),
    *("localhost:x", "127.1", "0x7f000001", "2130706433", "localhost evil", "[::1]evil", "."),
]
OWN_HOSTS = [
    *("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:1", "[::1]:8000"),
    *("192.168.1.5:8000", "[fe80::1]", "my-mac.local", "MY-MAC.local:8000"),
]
FOREIGN_PAGES = [
    *("https://evil.example", "http://localhost:1", "https://localhost:8000", "null", "file://"),
    *("", "http://chat.example", f"{PAGE}.evil.example", f"{PAGE}:444", "app://localhost"),
    *("http://localhost:8000@evil.example", "http://evil.example/http://localhost:8000"),
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
    """A page let its own name point to 127.0.0.1 (DNS rebinding), and was of our origin by that."""
    name = "rebound.example:8000"
    for headers in ({"Host": name}, {"Host": name, "Origin": f"http://{name}"}):
        assert client.post(TEXT, json=GOOD[TEXT], headers=headers).status_code == 403
    for path in ("/health", "/v1/models", "/v1/messages"):
        for host in FOREIGN_HOSTS:
            refused = client.get(path, headers={"Host": host})
            assert refused.status_code == 403, host
            assert "--allowed-host" in error_of(refused, path)
    for host in OWN_HOSTS:
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200, host
    with in_process(allowed_hosts=("*",)) as open_to_all:
        assert open_to_all.get("/", headers={"Host": "evil.example"}).status_code == 200


def test_a_server_for_the_network_knows_its_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Studio.fritz.box")
    machine = {"studio", "studio.fritz.box", "studio.local"}
    for host in ("0.0.0.0", "::", "192.168.1.5", "studio.fritz.box"):
        assert machine | {"localhost"} <= known_names(host, ())
    for host in ("127.0.0.1", "localhost", "::1"):
        assert not machine & known_names(host, ())
    assert "a.example" in known_names("127.0.0.1", ["a.example"])
    assert "*" not in known_names("0.0.0.0", ())


def test_foreign_pages_are_refused_and_own_ones_pass(client: httpx.Client) -> None:
    for page in FOREIGN_PAGES:
        for method, path in (("POST", TEXT), ("OPTIONS", "/v1/messages"), ("GET", "/")):
            headers = {"Host": "localhost:8123", "Origin": page}
            headers["Access-Control-Request-Method"] = "POST"
            refused = client.request(method, path, headers=headers)
            assert refused.status_code == 403, page
            assert "--cors-origin" in error_of(refused, path)
            assert "access-control-allow-origin" not in refused.headers
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
    assert preflight.status_code == 200  # Without a key: browsers send none here.
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    for key, status in ((OTHER, 200), ("x", 401)):
        headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
        response = locked.post(TEXT, json=GOOD[TEXT], headers=headers)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "Origin" in response.headers["vary"]


def test_which_pages_browsers_let_in() -> None:
    with in_process(cors_origins=("*",)) as client:
        for page in ("https://any.example", "null"):
            response = client.get("/v1/models", headers={"Origin": page})
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "*"
    with in_process() as client:
        assert client.get("/v1/models", headers={"Origin": PAGE}).status_code == 403
        assert "access-control-allow-origin" not in client.get("/v1/models").headers


BAD_NAMES = ["a.example:80", "http://a.example", "a b", "", "-", "*.a", "[::1]"]
BAD_ORIGINS = ["null", "a.example", "https://a.example/", "https://", "a b", "*."]
BAD_KEYS = ["", " a", "a\n", "a\x00b", "sk-sec\udcff"]


@pytest.mark.parametrize(
    ("kind", "values"), [(host_name, BAD_NAMES), (origin, BAD_ORIGINS), (secret, BAD_KEYS)]
)
def test_values_of_flags_that_are_none(kind: Callable[[str], str], values: list[str]) -> None:
    for value in values:
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            kind(value)
        assert "sk-sec" not in str(caught.value)  # No key is repeated.


def test_names_and_origins_are_brought_to_one_form() -> None:
    assert host_name("My-Mac.Local.") == "my-mac.local"
    assert origin("HTTPS://Chat.Example:8443") == "https://chat.example:8443"
    assert origin("app://obsidian.md") == "app://obsidian.md"
    assert host_name("*") == origin("*") == "*"


ROUTES = ["/v1/models", "/v1/models/test/model", "/metrics", TEXT, "/v1/messages", "/no/such/route"]
WRONG = ["", "Bearer", "Bearer x", f"Bearer {KEY[:-1]}", f"Bearer {KEY}4", f"Basic {KEY}", KEY]
OPEN = {"/": 200, "/health": 200, "/health/": 200, "/health?x": 200, "/%68ealth": 200}
CLOSED = ["/healthy", "/health/x", "/health//", "//health", "/%2e/health", "/metrics"]


def test_without_a_valid_key_nothing_opens_but_health(locked: httpx.Client) -> None:
    headers = [{}, *({"Authorization": wrong.encode()} for wrong in WRONG), {"x-api-key": "x"}]
    for path in ROUTES:
        for given in headers:
            for method in ("GET", "POST"):
                response = locked.request(method, path, headers=given)
                assert response.status_code == 401, (path, given)
                assert KEY not in response.text
                assert response.headers["www-authenticate"] == "Bearer"
                error_of(response, path)
                assert response.json()["error"]["type"] == "authentication_error"
    for path, status in {**OPEN, **dict.fromkeys(CLOSED, 401)}.items():
        url = httpx.URL("http://localhost", raw_path=path.encode())
        assert locked.get(url).status_code == status, path
    assert locked.get("/").json() == {"name": "mlx-mtp"}
    assert locked.head("/").status_code == 200
    assert locked.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_with_one_of_the_keys_everything_opens(locked: httpx.Client, key: str) -> None:
    for name, value in (
        *(("authorization", f"{scheme} {key}") for scheme in ("Bearer", "bearer", "BEARER")),
        ("x-api-key", key),
    ):
        headers = {name: value.encode()}
        assert locked.get("/v1/models", headers=headers).status_code == 200
        assert locked.get("/metrics", headers=headers).status_code == 200
        assert locked.get("/no/such/route", headers=headers).status_code == 404
        assert locked.post(TEXT, json=GOOD[TEXT], headers=headers).status_code == 200


def test_cve_2025_59425_the_time_tells_nothing_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM compared keys with `==`, whose time tells how many characters are right."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def noting(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(auth.hmac, "compare_digest", noting)
    keys = ("first", "second", "third")
    with in_process(api_keys=keys) as client:
        for given in (*keys, "fourth", "f", "", "x" * 5000):
            for headers in ({"x-api-key": given}, {"authorization": f"Bearer {given}".strip()}):
                compared.clear()
                status = client.get("/v1/models", headers=headers).status_code
                assert status == (200 if given in keys else 401)
                assert len(compared) == 2 * len(keys), "each key is compared, whichever was right"
                # By digests of one length: not even a key's length shows.
                assert {len(side) for pair in compared for side in pair} == {32}


def test_keys_are_in_no_log_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-very-secret"
    caplog.set_level(logging.DEBUG, "mlx_mtp")
    with in_process(api_keys=(key,)) as client:
        for name, value in (("Authorization", f"Bearer {key}"), ("x-api-key", key)):
            for headers in ({name: value}, {name: value + "x"}):
                for path in ("/v1/models", "/no/such/route"):
                    assert key not in client.get(path, headers=headers).text
                assert key not in client.post(TEXT, content=b"{", headers=headers).text
    assert key not in caplog.text
    assert key not in repr(ServerConfig("m", api_keys=(key,)))


def test_keys_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the laptop\nsk-one\n\n  sk-two \r\n#sk-three\nsk-one\n")
    for mode, warned in ((0o600, False), (0o640, False), (0o644, True)):
        caplog.clear()
        file.chmod(mode)
        assert read_keys(None, str(file)) == ("sk-one", "sk-two")
        assert ("chmod 600" in caplog.text) is warned
        assert "sk-one" not in caplog.text
    assert read_keys("sk-zero", str(file)) == ("sk-zero", "sk-one", "sk-two")
    assert read_keys("sk-zero", None) == ("sk-zero",)
    assert read_keys(None, None) == ()


def test_files_without_keys(tmp_path: Path) -> None:
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


def test_an_open_server_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
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
