"""Chats of the page: search, titles, pins, deletion, export and import."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mtp.text.tokenizer import Tokenizer
from tests.page.conftest import Open
from tests.page.test_hostile import RUN
from tests.page.test_page import address, finished, say
from tests.server.conftest import Serve
from tests.support.wire_help import saying

pytestmark = pytest.mark.full


def stored(tab: Any, title: str, content: str, at: int = 1) -> None:
    """Store a finished chat in the browser."""
    shared = {"reasoning": "", "calls": [], "steps": [], "state": "done", "finish": "stop"}
    nodes = {
        "a": {"id": "a", "parent": None, "role": "user", "content": "?"},
        "b": {"id": "b", "parent": "a", "role": "assistant", "content": content, **shared},
    }
    chat = {"id": title, "title": title, "at": at, "settings": {}, "nodes": nodes, "leaf": "b"}
    tab.evaluate("c => localStorage.setItem(`mlx-mtp.chat.${c.id}`, JSON.stringify(c))", chat)


OPEN_WEBUI = {
    "title": "From Open WebUI",
    "chat": {
        "history": {
            "currentId": "3",
            "messages": {
                "1": {"id": "1", "parentId": None, "role": "user", "content": "Hello?"},
                "2": {"id": "2", "parentId": "1", "role": "assistant", "content": "One."},
                "3": {"id": "3", "parentId": "1", "role": "assistant", "content": "Two."},
            },
        }
    },
}
CHATGPT = {
    "title": "From ChatGPT",
    "current_node": "c",
    "mapping": {
        "r": {"message": None, "parent": None},
        "s": {"message": {"author": {"role": "system"}, "content": {"parts": [""]}}, "parent": "r"},
        "b": {
            "message": {"author": {"role": "user"}, "content": {"parts": ["A", "B"]}},
            "parent": "s",
        },
        "c": {
            "message": {"author": {"role": "assistant"}, "content": {"parts": ["Answer."]}},
            "parent": "b",
        },
    },
}
HOSTILE = (
    {"title": f"<img src=x onerror={RUN}>", "settings": {"__proto__": {"x": 1}, "system": {}},
     "messages": [{"role": "user", "content": f"<script>{RUN}</script>"},
                  {"role": "assistant", "content": [{"text": "[x](javascript:1)"}, None, 5],
                   "tool_calls": [{"function": {"name": {}, "arguments": []}}]}]},
    {"title": {"a": 1}, "chat": {"history": {"currentId": "b", "messages": {
        "a": {"parentId": "b", "role": "user", "content": "circle"},
        "b": {"parentId": "a", "role": "assistant", "content": "circle"},
        "__proto__": {"parentId": "a", "role": "user", "content": "proto"}}}}},
    {"title": "x", "messages": [{"role": "user", "content": [
        {"image_url": {"url": "https://example.com/x.png"}},
        {"image_url": {"url": "data:text/html;base64,PHNjcmlwdD4="}}, {"text": "no image"}]}]},
)  # fmt: skip


def test_chats_are_found_named_and_taken_along(
    serve: Serve, tokenizer: Tokenizer, opened: Open, tmp_path: Path
) -> None:
    with serve(saying(tokenizer, "Yes.")) as client, opened(address(client)) as tab:
        tab.context.add_init_script("window.confirm = () => true")
        tab.reload()
        for at, (title, text) in enumerate([("One", "about geese"), ("Two", "about wolves")]):
            stored(tab, title, text, at)
        tab.reload()
        titles = tab.locator(".conversations li .link")
        tab.get_by_label("Search the chats").fill("GEESE")
        assert titles.all_inner_texts() == ["One"]
        tab.get_by_label("Search the chats").fill("")
        assert titles.all_inner_texts() == ["Two", "One"]
        titles.last.click()
        tab.get_by_role("button", name="Pin One").click()
        tab.get_by_role("button", name="Rename One").click()
        tab.get_by_label("Name of the chat").fill("First & foremost")
        tab.keyboard.press("Enter")
        assert titles.all_inner_texts() == ["★ First & foremost", "Two"]
        with tab.expect_download() as download:
            tab.get_by_role("button", name="Export all").click()
        everything = Path(download.value.path()).read_text()
        tab.get_by_role("button", name="Delete all").click()
        assert titles.all_inner_texts() == ["New chat"]

        def take(given: object) -> None:
            file = tmp_path / "chats.json"
            file.write_text(given if isinstance(given, str) else json.dumps(given))
            tab.get_by_label("Exported chats").set_input_files(file)

        take(everything)
        tab.get_by_text("2 chats imported.").wait_for()
        assert sorted(titles.all_inner_texts())[:2] == ["First & foremost", "Two"]
        take([OPEN_WEBUI, CHATGPT])
        tab.get_by_text("From ChatGPT").wait_for()
        assert tab.locator(".said").inner_text() == "A\nB"
        assert tab.locator(".markdown").inner_text() == "Answer."
        tab.get_by_text("From Open WebUI").click()
        assert tab.locator(".markdown").inner_text() == "Two."
        tab.get_by_role("button", name="Earlier version").click()
        assert tab.locator(".markdown").inner_text() == "One."
        tab.get_by_role("button", name="More").click()
        with tab.expect_download() as download:
            tab.get_by_role("button", name="Export", exact=True).click()
        take(Path(download.value.path()).read_text())
        tab.get_by_text("1 chat imported.").wait_for()
        assert tab.locator(".markdown").inner_text() == "One."
        tab.get_by_role("button", name="Later version").click()
        assert tab.locator(".markdown").inner_text() == "Two."
        say(tab, "And now?")
        finished(tab)
        for bad, told in (("{", "not JSON"), ("[1]", "no chat"), ({"messages": []}, "no messages")):
            take(bad)
            tab.locator(".keeping .failure", has_text=told).wait_for()
        for each in HOSTILE:
            take(each)
            tab.get_by_text("1 chat imported.").wait_for()
            assert tab.locator("article").count() >= 1
            assert tab.evaluate("window.pwned ?? {}.x ?? null") is None
            assert tab.locator("#app :is(script, img, [onerror])").count() == 0
        assert tab.get_by_text(address(client).removeprefix("http://")).count() == 1
        # The page reports that the storage is full, and shows the answer all the same.
        tab.evaluate("""() => { for (let size = 1 << 20; size > 100; size >>= 1) {
            try { for (let n = 0; ; n++) localStorage.setItem(`x${size} ${n}`, "x".repeat(size)); }
            catch {} } }""")
        say(tab, "long " * 300)
        tab.get_by_text("storage is full").wait_for()
        assert finished(tab) == "Yes."
