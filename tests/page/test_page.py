"""The page against real servers: its files and sizes, and what people do with it."""

import contextlib
import gzip
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_mtp.engine.request import PrefillProgress, Request
from mlx_mtp.server import page
from mlx_mtp.server.page import FOLDER
from mlx_mtp.text.tokenizer import Tokenizer
from tests.clients.npm import installed
from tests.page.conftest import Open
from tests.server.conftest import Serve, Served
from tests.support.fake_engine import EOS, FakeEngine, FakeInfo, Output, endless, out
from tests.support.process import STORY, Server, running
from tests.support.wire_help import saying

MOST_BYTES = 70_000  # compressed size of the first load
MOST_LINES = 2300  # length of our own scripts
MESSAGE = "textarea[aria-label='Your message']"
TOOL = [{"name": "get_weather", "parameters": {"type": "object", "properties": {}}}]
BAD_SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}

browsed = pytest.mark.full


def address(client: Served) -> str:
    return str(client.base_url).rstrip("/")


def say(tab: Any, text: str = STORY) -> None:
    tab.fill(MESSAGE, text)
    tab.press(MESSAGE, "Enter")


def answered(tab: Any, text: str = STORY) -> str:
    say(tab, text)
    return finished(tab)


def finished(tab: Any) -> str:
    """Returns the last answer's text once it is complete."""
    last = tab.locator("article.assistant").last
    last.locator(".figures").wait_for()
    return last.locator(".markdown").last.inner_text()


def configure(tab: Any, **values: str) -> None:
    button = tab.get_by_role("button", name="Settings", exact=True)
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    for name, value in values.items():
        tab.fill(f"#setting-{name}", value)


def imported(path: Path) -> set[Path]:
    """Returns a module and all modules that it imports statically."""
    found = {path}
    for target in re.findall(r'(?:from|import)\s*"(\.[^"]+)"', path.read_text("utf-8")):
        assert (path.parent / target).is_file(), f"{path.name} imports {target}"
        found |= imported((path.parent / target).resolve())
    return found


def test_the_page_is_small_and_needs_nothing_else() -> None:
    first = imported(FOLDER / "app.js") | {FOLDER / "index.html", FOLDER / "style.css"}
    assert sum(len(gzip.compress(path.read_bytes())) for path in first) < MOST_BYTES
    assert not first & set(FOLDER.glob("vendor/modes/*")) | first & {FOLDER / "live.js"}
    files = [FOLDER / name for name in page.page_files() if not name.endswith(".txt")]
    own = {path: path.read_text("utf-8") for path in files if path.parent == FOLDER}
    scripts = [text for path, text in own.items() if path.suffix == ".js"]
    assert sum(text.count("\n") for text in scripts) <= MOST_LINES
    assert set(re.findall(r"https?://[\w.]+", "".join(own.values()))) <= {
        "http://www.w3.org",
        "https://",
    }
    for path, text in own.items():
        for target in re.findall(r'import\("([^"$]+)"\)', text):
            imported((path.parent / target).resolve())
    modes = re.findall(r'"(\w+) \w+": "', own[FOLDER / "code.js"])
    assert len(set(modes)) >= 20 and all((FOLDER / f"vendor/modes/{m}.js").is_file() for m in modes)
    licences = (FOLDER / "vendor" / "LICENSES.txt").read_text("utf-8")
    for path in {*FOLDER.glob("vendor/**/*.*")} - {FOLDER / "vendor" / "LICENSES.txt"}:
        name = path.relative_to(FOLDER / "vendor")
        assert f"  {name if name.parent == Path() else name.parent / '*'} " in licences, name


@pytest.mark.full
def test_the_libraries_are_those_of_npm() -> None:
    """The files equal npm's, except for source maps and the import of preact in hooks.js."""
    folder = installed(Path(__file__).parent) / "node_modules"
    told = (FOLDER / "vendor" / "LICENSES.txt").read_text("utf-8").partition("\n\nhtm:")[0]
    rows = re.findall(r"(?m)^  (\S+) +(\S+) ([\d.]+) +(\S+) ", told)
    compared = set()
    for name, package, version, source in rows:
        assert json.loads((folder / package / "package.json").read_text())["version"] == version
        for path in (FOLDER / "vendor").glob(name):
            original = (folder / package / source).with_name(
                path.name if "*" in source else Path(source).name
            )
            texts = [path.read_bytes(), original.read_bytes()]
            texts = [
                re.sub(rb"\n*(//|/\*)# sourceMappingURL=\S+.*\n*$", b"", each).rstrip()
                for each in texts
            ]
            assert texts[0].replace(b'"./preact.js"', b'"preact"') == texts[1], name
            compared.add(path)
    assert compared == {*FOLDER.glob("vendor/**/*.*")} - {FOLDER / "vendor" / "LICENSES.txt"}


@browsed
def test_sixteen_browsers_at_once(mtp_server: Server, opened: Open) -> None:
    with contextlib.ExitStack() as stack:
        tabs = [stack.enter_context(opened(mtp_server.url)) for _ in range(16)]
        for number, tab in enumerate(tabs):
            configure(tab, seed=str(number), temperature="1")
            tab.fill(MESSAGE, STORY)
        for tab in tabs:
            tab.press(MESSAGE, "Enter")
        told = [finished(tab) for tab in tabs]
        assert len(set(told)) == 16
        for tab, text in zip(tabs, told):
            figures = tab.locator(".figures").inner_text()
            assert re.search(
                r"(?s)[\d.]+ tokens/s.*first token after.*cached.*drafts accepted", figures
            )
            tab.reload()
            assert finished(tab) == text
        # With the same seed and other rows in the batch, the answer is the same.
        for tab in tabs:
            tab.get_by_role("button", name="Regenerate", exact=True).click()
        for tab, text in zip(tabs, told):
            tab.get_by_text("2 of 2").wait_for()
            assert finished(tab) == text
    mtp_server.wait_until_empty()


@browsed
def test_a_conversation(mtp_server: Server, opened: Open) -> None:
    with opened(mtp_server.url, fails="completions") as tab:
        first = answered(tab)
        tab.get_by_role("button", name="use again").click()
        tab.get_by_role("button", name="Edit", exact=True).first.click()
        tab.get_by_label("Ask this instead").fill("What is the opposite of hot?")
        tab.get_by_role("button", name="Send").first.click()
        tab.get_by_text("2 of 2").wait_for()
        assert finished(tab) != first
        tab.get_by_role("button", name="Earlier version").click()
        assert finished(tab) == first
        tab.get_by_role("switch").check()
        shown = "".join(tab.locator(".tokens .token").all_text_contents())
        assert shown.partition("<|im_end|>")[0].split() == first.split()
        assert tab.locator(".token.from-mtp").count() > 10
        # Hovering and the arrow keys show a step's details.
        tab.locator(".of-step").nth(3).hover()
        assert tab.locator(".step").inner_text().startswith("Step 4. Drafted")
        tab.locator(".tokens").press("ArrowRight")
        assert tab.locator(".step").inner_text().startswith("Step 5.")
        tab.get_by_role("switch").uncheck()
        with tab.expect_download() as download:
            tab.get_by_role("button", name="More").click()
            tab.get_by_role("button", name="Export", exact=True).click()
        messages = json.loads(Path(download.value.path()).read_text())["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"]
        assert messages[1]["content"].split() == first.split()
        # A second conversation; both are there after a reload.
        tab.get_by_role("button", name="New chat").first.click()
        configure(tab, schema=json.dumps(BAD_SCHEMA))
        say(tab, "hi")
        told = tab.locator("article .failure").inner_text()
        assert "$ref" in told or "nowhere" in told
        assert tab.locator(".settings .failure").inner_text() in told
        configure(tab, schema="{nothing")
        tab.locator("#setting-schema").blur()
        assert "not JSON" in tab.locator(".settings .failure").inner_text()
        configure(
            tab, schema='{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}'
        )
        tab.get_by_role("button", name="Try again").click()
        assert json.loads(finished(tab)) == {"a": 1}
        tab.reload()
        assert tab.locator(".conversations li").count() == 2


@browsed
def test_a_tool_call_is_answered(serve: Serve, tokenizer: Tokenizer, opened: Open) -> None:
    called = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    engine = saying(tokenizer, called)
    with serve(engine) as client, opened(address(client)) as tab:
        configure(tab, tools=json.dumps(TOOL))
        say(tab, "How is the weather?")
        tab.get_by_label("Its result").fill("It rains.")
        assert '"city": "Rome"' in tab.locator(".call code").last.inner_text()
        tab.get_by_role("button", name="Send the result").click()
        tab.get_by_text("Result of get_weather").wait_for()
        tab.locator(".figures").nth(1).wait_for()
        assert "It rains." in tokenizer.text_of(engine.submitted[-1].prompt_token_ids)


@browsed
def test_a_long_prompt_shows_how_much_of_it_is_computed(serve: Serve, opened: Open) -> None:
    def script(_: Request) -> Iterator[Output]:
        yield out(progress=PrefillProgress(9000, 1000, 4000, time.perf_counter()))
        while True:
            yield None

    with serve(FakeEngine(script)) as client, opened(address(client)) as tab:
        say(tab, "Longer\n" * 50 + "than a screen.")
        told = tab.get_by_text("4,000 of 9,000 tokens of the prompt are computed.")
        told.wait_for()
        box, height = told.bounding_box(), tab.viewport_size["height"]
        assert 0 < box["y"] < height - box["height"]
        tab.get_by_role("button", name="Stop").first.click()
        tab.get_by_text("Stopped.").wait_for()


@browsed
def test_stop_and_the_tabs_of_one_browser(serve: Serve, tokenizer: Tokenizer, opened: Open) -> None:
    """Eight tabs share one /live; four answers run, and two wait until the four are stopped."""
    (token,) = tokenizer.encode(" fox")

    def script(_: Request) -> Iterator[Output]:
        while True:
            yield out(token)
            yield from [None] * 50

    engine = FakeEngine(script)
    with serve(engine) as client, opened(address(client)) as tab:
        url, context = tab.url.partition("#")[0], tab.context
        watching: list[str] = []
        context.on("request", lambda r: watching.append(r.url) if r.url.endswith("/live") else None)
        lives = [context.new_page() for _ in range(8)]
        for live in lives:
            live.goto(f"{url}#live")
            live.locator(".headline").wait_for()
        assert len(watching) == 1
        talking = [tab, *(context.new_page() for _ in range(5))]
        for number, each in enumerate(talking):
            each.goto(url)
            each.get_by_role("button", name="New chat").first.click()
            say(each, "hi")
            if number < 4:
                each.locator("article.assistant .markdown").wait_for()
        for each in talking[4:]:
            each.get_by_text("4 answers are running in this browser").wait_for()
        assert len(engine.submitted) == 4
        lives[3].get_by_role("button", name=re.compile("Cancel the answer")).nth(3).wait_for()
        for each in talking[:4]:
            each.get_by_role("button", name="Stop").first.click()
            each.get_by_text("Stopped.").wait_for()
        for each in talking[4:]:
            each.locator("article.assistant .markdown").wait_for()
        # An answer is cancelled in the Live view.
        lives[0].get_by_role("button", name=re.compile("Cancel the answer")).first.click()
        assert engine.wait_for(lambda: len(engine.running) == 1)
        # If the tab that reads /live is closed, another one takes over.
        with context.expect_event("request", lambda r: r.url.endswith("/live")):
            lives[0].close()


@browsed
def test_two_tabs_with_one_chat(serve: Serve, tokenizer: Tokenizer, opened: Open) -> None:
    """A question in one tab is kept while the other's answer grows; a deletion applies to both."""
    (token,) = tokenizer.encode(" fox")

    def script(request: Request) -> Iterator[Output]:
        while "bear" not in tokenizer.text_of(request.prompt_token_ids):
            yield out(token)
            yield from [None] * 50
        yield out(EOS, finish="stop")

    engine = FakeEngine(script)
    with serve(engine) as client, opened(address(client)) as tab:
        say(tab, "A wolf?")
        tab.locator("article.assistant .markdown").wait_for()
        other = tab.context.new_page()
        other.goto(tab.url)
        other.get_by_text("A wolf?").last.wait_for()
        say(other, "A bear?")
        # The first tab still saves the chat every second while its answer grows.
        tab.locator("article").nth(3).wait_for()
        for each in (tab, other):
            each.locator("article.assistant .figures").wait_for()
            each.wait_for_timeout(2500)
            assert each.locator("article").count() == 4
        assert len(engine.running) == 1
        other.evaluate("window.confirm = () => true")
        other.get_by_role("button", name="Delete A wolf?").click()
        assert engine.wait_for(lambda: not engine.running)
        for each in (tab, other):
            each.get_by_text("A wolf?").first.wait_for(state="detached")
        tab.reload()
        tab.locator(".empty").wait_for()


@browsed
def test_a_server_that_goes_away_and_comes_back(opened: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--port", str(port), "--calibration-seconds", "0")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(*flags))
        tab = stack.enter_context(opened(server.url, fails=""))
        first = answered(tab)
        server.process.terminate()
        server.process.wait()
        say(tab, "Are you there?")
        tab.get_by_text("The server does not answer. Is it running?").wait_for()
        notice = tab.get_by_text("This page goes on by itself")
        notice.wait_for()
        stack.enter_context(running(*flags))
        notice.wait_for(state="detached")
        tab.get_by_role("button", name="Try again").click()
        assert finished(tab) != first
        assert tab.locator("article").count() == 4


@browsed
def test_the_key_is_asked_for_and_kept_for_the_tab(
    serve: Serve, tokenizer: Tokenizer, opened: Open
) -> None:
    engine = saying(tokenizer, "Hello there.")
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(serve(engine, api_keys=("right",)))
        tab = stack.enter_context(opened(address(client), fails="models"))
        asked = tab.get_by_label("API key")
        asked.wait_for()
        assert tab.locator("nav").count() == 0 and "test/model" not in tab.content()
        for key in ("wrong", "right"):
            asked.fill(key)
            tab.get_by_role("button", name="Open").click()
            if key == "wrong":
                tab.get_by_text("refuses this key").wait_for()
        assert answered(tab, "hi") == "Hello there."
        tab.reload()
        assert finished(tab) == "Hello there."
        assert "right" not in tab.evaluate("JSON.stringify(localStorage)")
        other = tab.context.new_page()
        other.goto(tab.url)
        other.get_by_label("API key").wait_for()


@browsed
@pytest.mark.parametrize(("sources", "counts"), [((), None), (("copy",), 2), (("mtp",), 10)])
def test_a_phone_cancels_without_scrolling_and_offers_the_drafts_that_there_are(
    serve: Serve, opened: Open, sources: tuple[str, ...], counts: int | None
) -> None:
    engine = FakeEngine(endless(300), FakeInfo(draft_sources=sources, max_model_len=60_000))
    size = {"width": 390, "height": 740}
    with serve(engine) as client, opened(address(client), viewport=size) as tab:
        # The settings of a chat can come from another server.
        tab.evaluate("""localStorage.setItem("mlx-mtp.chat.a", JSON.stringify(
            {id: "a", title: "a", at: 1, settings: {drafts: "3"}, leaf: "q",
             nodes: {q: {id: "q", parent: null, role: "user", content: "before"}}}))""")
        tab.reload()
        tab.get_by_text("before").wait_for()
        say(tab, "hi")
        tab.locator("article.assistant .markdown").wait_for()
        assert engine.submitted[0].options.num_draft_tokens == (3 if "mtp" in sources else None)
        configure(tab)
        choices = tab.get_by_label("Drafts a step").locator("option")
        assert choices.count() == (counts or 0)
        tab.get_by_role("link", name="Live").click()
        cancel = tab.get_by_role("button", name=re.compile("Cancel the answer"))
        cancel.wait_for()
        box = cancel.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= size["width"]
        cancel.click()
        tab.get_by_text("No answer is running").wait_for()
