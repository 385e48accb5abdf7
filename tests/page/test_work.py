"""The page as a place to work: unsent text, files, branches, chats, the context."""

import base64
import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from mlx_mtp.engine.request import Request
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.vision.images import ImageSizes
from tests.page.conftest import Open
from tests.page.test_hostile import RUN
from tests.page.test_page import MESSAGE, address, answered, configure, finished, say
from tests.server.conftest import Serve
from tests.support.fake_engine import FakeEngine, FakeInfo, Output, endless, out
from tests.support.process import STORY, Server
from tests.support.wire_help import saying
from tests.vision.served import seeing_library_tokenizer

pytestmark = pytest.mark.full

ACTIVE = "document.activeElement.id"


def picture(kind: str = "PNG", size: tuple[int, int] = (16, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, kind)
    return buffer.getvalue()


def attach(tab: Any, *files: tuple[str, str, bytes]) -> None:
    payloads = [{"name": n, "mimeType": kind, "buffer": data} for n, kind, data in files]
    tab.locator(".composer input[type=file]").set_input_files(payloads)


def give(tab: Any, event: str, name: str, kind: str, text: str) -> None:
    """Drop or paste a file."""
    tab.evaluate(
        """([event, name, type, text]) => {
            const data = new DataTransfer();
            data.items.add(new File([text], name, {type}));
            const init = {bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data};
            const Made = event === "paste" ? ClipboardEvent : DragEvent;
            document.body.dispatchEvent(new Made(event, init));
        }""",
        [event, name, kind, text],
    )


def test_what_is_typed_is_never_lost(serve: Serve, tokenizer: Tokenizer, opened: Open) -> None:
    """Text, files and edits survive other views, chats and tabs, and a reload."""
    with serve(saying(tokenizer, "Yes.")) as client, opened(address(client)) as tab:
        tab.fill(MESSAGE, "half a question")
        attach(tab, ("a.py", "text/x-python", b"print(1)\n"))
        tab.get_by_text("a.py").wait_for()
        tab.get_by_role("link", name="Live").click()
        tab.locator(".headline").wait_for()
        tab.get_by_role("link", name="Chat").click()
        assert tab.input_value(MESSAGE) == "half a question"
        tab.reload()
        tab.get_by_text("a.py").wait_for()
        assert tab.input_value(MESSAGE) == "half a question"
        tab.get_by_role("button", name="New chat").first.click()
        assert tab.input_value(MESSAGE) == ""
        say(tab, "another")
        assert finished(tab) == "Yes."
        tab.get_by_role("button", name="Edit", exact=True).first.click()
        tab.get_by_label("Ask this instead").fill("another one, changed")
        other = tab.context.new_page()
        other.goto(tab.url)
        assert other.get_by_label("Ask this instead").input_value() == "another one, changed"
        for each in (other, tab):
            each.bring_to_front()
            each.locator(".conversations li .link").last.click()
            assert each.input_value(MESSAGE) == "half a question"
            each.get_by_text("a.py").wait_for()
        # Once sent, the text is gone in every tab, and the request has the file.
        tab.press(MESSAGE, "Enter")
        finished(tab)
        other.reload()
        assert (
            other.input_value(MESSAGE) == "" and other.locator(".composer .attached").count() == 0
        )
        assert tab.input_value(MESSAGE) == ""


def test_keys(serve: Serve, opened: Open) -> None:
    engine = FakeEngine(endless(300), FakeInfo(max_model_len=60_000))
    with serve(engine) as client, opened(address(client)) as tab:
        tab.locator(MESSAGE).wait_for()
        tab.locator(f"{MESSAGE}:focus").wait_for()
        low = tab.locator(MESSAGE).bounding_box()["height"]
        tab.keyboard.type("one")
        for _ in range(60):
            tab.keyboard.press("Shift+Enter")
        tab.keyboard.type("two")
        height = tab.viewport_size["height"]
        assert (
            low < 60 < 0.45 * height < tab.locator(MESSAGE).bounding_box()["height"] <= height / 2
        )
        tab.keyboard.press("Enter")
        tab.locator("article.assistant .markdown").wait_for()
        assert tab.locator(".said").inner_text().startswith("one\n") and len(engine.submitted) == 1
        assert tab.evaluate(ACTIVE) == "message"
        tab.keyboard.press("Escape")
        tab.get_by_text("Stopped.").wait_for()
        assert engine.wait_for(lambda: not engine.running)
        tab.keyboard.press("ArrowUp")
        edited = tab.get_by_label("Ask this instead")
        edited.fill("three")
        edited.press("Escape")
        assert edited.count() == 0 and tab.evaluate(ACTIVE) == "message"
        tab.keyboard.press("ArrowUp")
        tab.get_by_label("Ask this instead").fill("three")
        tab.keyboard.press("Control+Enter")
        tab.get_by_text("2 of 2").wait_for()
        tab.keyboard.press("Escape")
        tab.get_by_text("Stopped.").wait_for()
        # A typed letter goes into the message box; a question mark elsewhere shows the list.
        tab.locator(".messages").focus()
        tab.keyboard.press("?")
        tab.locator("dialog[open]").wait_for()
        tab.keyboard.press("Escape")
        tab.locator("dialog").wait_for(state="detached")
        tab.locator(".messages").focus()
        tab.keyboard.type("four")
        assert tab.input_value(MESSAGE) == "four"
        tab.keyboard.press("Control+/")
        tab.locator("dialog[open]").get_by_role("button", name="Close").click()
        tab.keyboard.press("Control+k")
        tab.locator("#search:focus").wait_for()
        tab.keyboard.press("Control+Shift+O")
        tab.locator(".empty").wait_for()
        assert tab.evaluate(ACTIVE) == "message"


def test_a_phone_sends_by_its_button(serve: Serve, tokenizer: Tokenizer, opened: Open) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with serve(saying(tokenizer, "Yes.")) as client, opened(address(client), **phone) as tab:
        tab.locator(MESSAGE).tap()
        tab.keyboard.type("one")
        tab.keyboard.press("Enter")
        tab.keyboard.type("two")
        assert tab.input_value(MESSAGE) == "one\ntwo"
        tab.get_by_role("button", name="Send").tap()
        assert finished(tab) == "Yes."
        for button in tab.locator(".tools > button, .composer button").all():
            box = button.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 360
            assert min(box["width"], box["height"]) >= 24
        tab.get_by_role("button", name="Chats").tap()
        tab.get_by_role("button", name="Pin one").tap()
        assert tab.evaluate("document.documentElement.scrollWidth") == 360


def test_files_become_part_of_the_question(serve: Serve, opened: Open) -> None:
    tokenizer = Tokenizer(seeing_library_tokenizer(), "the test's model")
    pad = tokenizer.added_tokens["<|image_pad|>"]
    sizes = ImageSizes(4, 2, least_pixels=64, most_pixels=1 << 20, most_tokens=64, token_id=pad)
    info = FakeInfo(vocab_size=5000, max_model_len=2000, images=sizes)
    engine = saying(tokenizer, "Yes.")
    engine.info = info
    nasty = f"<img src=x onerror={RUN}>`.py"
    with serve(engine, tokenizer=tokenizer) as client, opened(address(client)) as tab:
        sent: list[Any] = []
        tab.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
        tab.get_by_text("drop a picture").wait_for()
        png = picture()
        attach(tab, ("red.png", "image/png", png), (nasty, "", "é = '```'".encode()))
        tab.locator(".composer .attached").nth(1).wait_for()
        give(tab, "paste", "pasted.txt", "text/plain", "pasted text")
        give(tab, "drop", "dropped.svg", "image/svg+xml", f"<svg onload={RUN}/>")
        tab.get_by_text("dropped.svg").wait_for()
        tab.get_by_role("button", name="Remove pasted.txt").click()
        assert (
            tab.locator(".composer img").evaluate("i => i.decode().then(() => i.naturalWidth)")
            == 16
        )
        # Files that can't be sent are refused with the reason.
        refused = {
            "has about": ("long.txt", "text/plain", b"word " * 20_000),
            "neither text": ("a.pdf", "application/pdf", b"%PDF\xff\xfe"),
            "no image": ("b.png", "image/png", b"\x89PNG nothing"),
            "sides": ("c.png", "image/png", picture(size=(500, 1))),
            "an image may have": ("d.png", "image/png", png + bytes(33 << 20)),
        }
        for told, file in refused.items():
            attach(tab, file)
            tab.locator(".composer .failure", has_text=told).wait_for()
        assert tab.locator(".composer .attached").count() == 3
        say(tab, "What are these?")
        finished(tab)
        image, text = sent[-1]["messages"][0]["content"]
        assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == png
        name = nasty.replace("`", " ")
        assert text["text"] == (
            f"{name}:\n````py\né = '```'\n````\n\n"
            f"dropped.svg:\n```svg\n<svg onload={RUN}/>\n```\n\nWhat are these?"
        )
        tab.reload()
        tab.locator("article.user img").wait_for()
        assert tab.locator("article.user .attached").count() == 3
        assert tab.evaluate("window.pwned") is None
        # An image of another type is converted, and an edited question keeps its files.
        tab.get_by_role("button", name="Edit", exact=True).first.click()
        tab.get_by_label("Ask this instead").fill("And now?")
        tab.get_by_role("button", name="Send").first.click()
        tab.get_by_text("2 of 2").wait_for()
        finished(tab)
        attach(tab, ("red.bmp", "image/bmp", picture("BMP")))
        tab.locator(".composer .attached").wait_for()
        say(tab, "")
        tab.locator("article.assistant .figures").nth(1).wait_for()
        assert len(sent[-1]["messages"][0]["content"]) == 2
        assert sent[-1]["messages"][2]["content"][0]["image_url"]["url"].startswith(
            "data:image/png"
        )
    blind = saying(tokenizer, "Yes.")
    with serve(blind, tokenizer=tokenizer) as client, opened(address(client)) as tab:
        tab.locator(MESSAGE).wait_for()
        attach(tab, ("red.png", "image/png", png))
        tab.get_by_text("can't see images").last.wait_for()
        assert tab.locator(".composer .attached").count() == 0


def test_an_answer_that_was_cut_goes_on_as_it_would_have(mtp_server: Server, opened: Open) -> None:
    with opened(mtp_server.url) as tab:
        configure(tab, seed="5", temperature="1", max_tokens="60")
        whole = answered(tab)
        configure(tab, max_tokens="20")
        tab.get_by_role("button", name="Regenerate the last answer").click()
        tab.get_by_text("2 of 2").wait_for()
        cut = finished(tab)
        assert whole.startswith(cut) and len(cut) < len(whole)
        for _ in range(2):
            tab.get_by_role("button", name="Continue").click()
            tab.get_by_role("button", name="Stop").first.wait_for(state="detached")
        assert finished(tab) == whole
        assert "temperature 1" in tab.locator(".figures").inner_text()


def test_messages_are_edited_deleted_and_read_raw(
    serve: Serve, tokenizer: Tokenizer, opened: Open
) -> None:
    granted = {"permissions": ["clipboard-read", "clipboard-write"]}
    said = "A **bold** word, $x^2$.\n\n```py\n1\n```"
    with serve(saying(tokenizer, said)) as client, opened(address(client), **granted) as tab:
        tab.context.add_init_script("window.confirm = () => true")
        tab.reload()
        say(tab, "first")
        finished(tab)
        tab.get_by_role("button", name="Raw text").click()
        assert tab.locator(".raw").inner_text() == said
        tab.get_by_role("button", name="Copy as Markdown", exact=True).click()
        tab.get_by_role("button", name="Copied").wait_for()
        assert tab.evaluate("navigator.clipboard.readText()") == said
        tab.get_by_role("button", name="Raw text").click()
        tab.locator("article.assistant").get_by_role("button", name="Edit").click()
        tab.get_by_label("The answer as it should be").fill("Mine.")
        tab.get_by_role("button", name="Keep").click()
        tab.get_by_text("2 of 2").wait_for()
        assert tab.locator("article.assistant .markdown").inner_text() == "Mine."
        sent: list[Any] = []
        tab.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
        say(tab, "second")
        tab.locator(".figures").wait_for()
        assert [m["content"] for m in sent[-1]["messages"]] == ["first", "Mine.", "second"]
        other = tab.context.new_page()
        other.goto(tab.url)
        other.locator("article").nth(3).wait_for()
        tab.get_by_role("button", name="More").click()
        tab.get_by_role("button", name="Copy all as Markdown").click()
        tab.wait_for_timeout(500)
        assert tab.evaluate("navigator.clipboard.readText()").startswith("# first\n\n## You\n")
        # Deleting a version shows the other one; deleting a question deletes all its answers.
        tab.locator("article.assistant").first.get_by_role("button", name="Delete").click()
        tab.locator(".branches").wait_for(state="detached")
        assert tab.locator("article").count() == 2
        other.locator("article").nth(2).wait_for(state="detached")
        assert "bold" in other.locator("article.assistant .markdown").inner_text()
        other.reload()
        assert other.locator("article").count() == 2
        # A question whose answer was deleted can be answered again.
        tab.locator("article.assistant").get_by_role("button", name="Delete").click()
        tab.get_by_role("button", name="Answer", exact=True).click()
        finished(tab)
        assert tab.locator("article").count() == 2
        tab.locator("article.user").get_by_role("button", name="Delete").click()
        tab.locator(".empty").wait_for()
        other.locator(".empty").wait_for()


def test_the_context_is_told_and_warned_of(serve: Serve, opened: Open) -> None:
    """With 400 tokens, an answer of 300 nearly fills the context, and a long text does not fit."""

    def script(_: Request) -> Iterator[Output]:
        yield out(*[300] * 300, finish="length")

    engine = FakeEngine(script, FakeInfo(max_model_len=400))
    with serve(engine) as client, opened(address(client)) as tab:
        tab.locator(MESSAGE).wait_for()
        assert tab.locator(".context").count() == 0
        say(tab, "hi")
        told = tab.locator(".context")
        told.wait_for()
        assert re.search(r"3\d\d of 400 tokens of context used \((7|8)\d%\)", told.inner_text())
        tab.fill(MESSAGE, "word " * 40)
        told.get_by_text(re.compile(r"About \d+ are left with this text")).wait_for()
        tab.fill(MESSAGE, "word " * 400)
        told.get_by_text("This text does not fit").wait_for()
        assert "failure" in told.get_attribute("class")


def test_the_state_of_several_models_is_told(serve: Serve, opened: Open) -> None:
    """The list shows the states; a question to a model on disk says that it is being loaded."""
    states = {"one": "ready", "two": "on disk"}

    def script(_: Request) -> Iterator[Output]:
        while states["two"] != "ready":
            yield None
        yield out(300, finish="length")

    def models(route: Any) -> None:
        card = {"draft_sources": [], "max_model_len": 1024}
        data = [{"id": name, "state": state, **card} for name, state in states.items()]
        route.fulfill(json={"data": data})

    engine = FakeEngine(script)
    with serve(engine, any_model_name=True) as client, opened(address(client)) as tab:
        tab.route("**/v1/models", models)
        tab.reload()
        picker = tab.get_by_label("Model", exact=True)
        picker.select_option("two")
        assert picker.locator("option").all_inner_texts() == ["one (ready)", "two (on disk)"]
        say(tab, "hi")
        tab.get_by_text("two is being loaded into memory").wait_for()
        states["two"] = "ready"
        finished(tab)
        assert tab.locator("article.assistant > h2").inner_text() == "two"


def test_the_first_view_says_what_one_can_do(mtp_server: Server, opened: Open) -> None:
    with opened(mtp_server.url) as tab:
        loaded: list[str] = []
        tab.on("request", lambda r: loaded.append(r.url))
        tab.reload()
        tab.locator(".examples button").first.click()
        assert tab.input_value(MESSAGE) and tab.evaluate(ACTIVE) == "message"
        assert not [u for u in loaded if re.search(r"live|clients|katex|modes|fonts|transfer", u)]
        tab.fill(MESSAGE, STORY)
        tab.press(MESSAGE, "Enter")
        finished(tab)
        tab.get_by_role("link", name="Live").click()
        tab.get_by_text("What the words mean").click()
        assert "guessed ahead" in tab.locator(".words").inner_text()
        text = tab.locator("main").inner_text()
        assert not re.search(r"\(mtp\)|\brows?\b|prefixes", text), text
