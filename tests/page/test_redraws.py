"""Redraws of large answers in the browser; `-s` shows how long they take (no time is asserted)."""

import pytest

from tests.page.conftest import Open
from tests.page.test_markdown import LARGE
from tests.server.conftest import Serve
from tests.support.fake_engine import FakeEngine, endless

pytestmark = pytest.mark.full

# Grows an answer to its last 40 x 8 characters, then adds these in 40 redraws, with layout.
MEASURE = """async (text) => {
    const { render } = await import("/page/vendor/preact.js");
    const { html } = await import("/page/ui.js");
    const { Markdown } = await import("/page/markdown.js");
    const box = document.createElement("div"), base = text.length - 320;
    const frame = () => new Promise((done) => requestAnimationFrame(done));
    document.querySelector(".messages").append(box);
    const draw = (length) => render(html`<${Markdown} text=${text.slice(0, length)} />`, box);
    for (let part = 1; part <= 20; part++) (draw(Math.floor(base * part / 20)), await frame());
    await new Promise((done) => setTimeout(done, 2000));
    const times = [];
    let last = box.querySelectorAll("*").length, kept = box.querySelector(".markdown").firstChild;
    for (let length = base + 8; length <= text.length; length += 8) {
        const began = performance.now();
        draw(length);
        box.offsetHeight;
        times.push(performance.now() - began);
        await frame();
    }
    times.sort((a, b) => a - b);
    const isKept = kept === box.querySelector(".markdown").firstChild;
    return [times[20], times[36], times[39], box.querySelectorAll("*").length, last, isKept];
}"""


def test_redraws_of_large_answers(serve: Serve, opened: Open) -> None:
    with serve(FakeEngine(endless(300))) as client, opened(str(client.base_url)) as tab:
        tab.locator(".messages").wait_for()
        for name, (text, _) in LARGE.items():
            median, most, longest, count, before, is_kept = tab.evaluate(MEASURE, text)
            print(f"{name}: {len(text)} characters, {count} elements: {median:.1f} ms, ", end="")
            print(f"nine of ten under {most:.1f} ms, all under {longest:.1f} ms")
            assert count >= before > 1 and is_kept
