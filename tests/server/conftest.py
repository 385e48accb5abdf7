"""An application served on a loopback port, around an engine that a test scripts."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from llguidance import LLTokenizer

from mlx_mtp.config import ServerConfig
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.sampling import grammar
from mlx_mtp.server.app import create_app
from mlx_mtp.server.serving import Server, bind, make_server
from mlx_mtp.text.sandbox import text_worker
from mlx_mtp.text.tokenizer import Tokenizer
from tests.support.fake_engine import FakeEngine

MODEL = "test/model"


class Served(httpx.Client):
    """A client with its server, which a test can stop."""

    server: Server

    @property
    def address(self) -> tuple[str, int]:
        return self.base_url.host, self.base_url.port or 0


@contextlib.contextmanager
def listening(app: FastAPI, client: Served, **settings: Any) -> Iterator[None]:
    """Serve an application on a loopback port, and set the address of `client`."""
    ready = threading.Event()
    client.server = server = make_server(app, on_ready=ready.set, **settings)
    with bind("127.0.0.1", 0) as sock:
        client.base_url = httpx.URL(f"http://127.0.0.1:{sock.getsockname()[1]}")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(30)
            with client:
                yield
        finally:
            server.should_exit = True
            thread.join()


Serve = Callable[..., contextlib.AbstractContextManager[Served]]


@cache
def library_tokenizer() -> Any:
    """Returns the bundled tokenizer as an object of transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))


def tokenizer_with(template: str) -> Tokenizer:
    """Returns the bundled tokenizer with another chat template."""
    inner = copy.copy(library_tokenizer())
    inner.chat_template = template
    return Tokenizer(inner, "the test's model")


@pytest.fixture(scope="session", autouse=True)
def _one_grammar_tokenizer() -> Iterator[None]:
    """Make llguidance's tokenizer once per tokenizer.json, not once per application."""

    @cache
    def made(tokenizer_json: str, eos_token: tuple[int, ...]) -> LLTokenizer:
        return LLTokenizer(tokenizer_json, eos_token=list(eos_token))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "LLTokenizer", lambda text, eos_token: made(text, tuple(eos_token)))
        yield


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one process for templates and tokenizers: each takes 1 s of processor time to start."""
    monkeypatch.setattr(text_worker, "NUM_WORKERS", 1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL)


@pytest.fixture(scope="session")
def serve(tokenizer: Tokenizer) -> Serve:
    """`with serve(engine, **settings) as client`: a real server and a client for it."""

    @contextlib.contextmanager
    def serving(
        engine: FakeEngine,
        defaults: dict[str, Any] | None = None,
        *,
        tokenizer: Tokenizer = tokenizer,
        **settings: Any,
    ) -> Iterator[Served]:
        config = ServerConfig(**({"model_name": MODEL, "seed": 1} | settings))
        app = create_app(engine, tokenizer, config, defaults or {})
        client = Served(timeout=30)
        with listening(app, client, log_level="critical"):
            yield client

    return serving
