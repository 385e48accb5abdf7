import httpx
import pytest

from tests.bench.fake_server import FakeServer, refused


@pytest.fixture
def serve(monkeypatch):
    """Start a fake server; httpx's asynchronous clients reach these and no others."""
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
    """The clock of a module goes on by a second whenever it is read."""
    times = iter(range(1_000_000))

    def tick(*modules) -> None:
        for module in modules:
            monkeypatch.setattr(module, "perf_counter", lambda: float(next(times)))

    return tick
