import httpx
import pytest

from tests.bench.fake_server import FakeServer, refused


@pytest.fixture
def serve(monkeypatch):
    """Returns a function that starts a fake server; async httpx clients reach no other servers."""
    servers: list[FakeServer] = []

    def start(*args, **more) -> FakeServer:
        servers.append(FakeServer(f"http://fake-{len(servers)}", *args, **more))
        return servers[-1]

    async def send(_, request: httpx.Request) -> httpx.Response:
        for server in servers:
            if server.url == f"http://{request.url.host}":
                return await server.answer(request)
        raise refused()

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", send)
    return start


@pytest.fixture
def ticking(monkeypatch):
    """Returns `tick(*modules)`: each read of the clock in those modules advances it by a second."""
    times = iter(range(1_000_000))

    def tick(*modules) -> None:
        for module in modules:
            monkeypatch.setattr(module, "perf_counter", lambda: float(next(times)))

    return tick
