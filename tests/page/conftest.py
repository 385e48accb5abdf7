"""Chromium, and tabs that record everything that a page must never do."""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.conftest import serve, tokenizer
from tests.support.process import Server, running

__all__ = ["serve", "tokenizer"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NAMES += ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",)  # not in PATH there
Open = Callable[..., contextlib.AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; while it is open, playwright's event loop runs in the tests' thread."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    with api.sync_playwright() as playwright:
        # As root in a container, Chromium can't set up its own sandbox.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def mtp_server() -> Iterator[Server]:
    """A server that always drafts; by default it does not if a busy machine makes drafts slow."""
    flags = ("--mtp-num-draft-tokens", "3", "--prefix-cache-size", "200MB", "--dtype", "float32")
    with running(*flags) as server:
        yield server


@pytest.fixture
def opened(browser: Any) -> Open:
    """`with opened(url, **context) as tab`: a page in a browser context of its own.

    At the end there must be no console message, no dialog and no request to another host. `fails`
    is a pattern for addresses of requests that the test makes fail, which Chromium reports on the
    console.
    """

    @contextlib.contextmanager
    def open_tab(url: str, *, fails: str = "(?!)", **settings: Any) -> Iterator[Any]:
        seen: list[str] = []

        def on_console(message: Any) -> None:
            place = message.location["url"]
            expected = "Failed to load" in message.text and re.search(fails, place)
            if message.type in ("error", "warning") and not expected:
                seen.append(f"{message.text} ({place})")

        def on_request(request: Any) -> None:
            if not request.url.startswith((url, "blob:")):
                seen.append(f"a request to {request.url}")

        context = browser.new_context(**settings)
        context.on("console", on_console)
        context.on("weberror", lambda error: seen.append(str(error.error)))
        context.on("dialog", lambda dialog: (seen.append(dialog.message), dialog.dismiss()))
        context.on("request", on_request)
        context.set_default_timeout(60_000)
        tab = context.new_page()
        tab.goto(url)
        try:
            yield tab
        finally:
            context.close()
        assert not seen

    return open_tab
