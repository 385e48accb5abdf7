"""Redraws of large answers in the browser; `-s` prints their times, which are not asserted."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.page.conftest import Open
from tests.page.test_markdown import FORMULAS, LARGE
from tests.server.conftest import Serve
from tests.support.fake_engine import FakeEngine, endless

pytestmark = pytest.mark.full

BEGIN = """async (text) => {
    const { render } = await import("/page/vendor/preact.js");
    const { html } = await import("/page/ui.js");
    const { Markdown } = await import("/page/markdown.js");
    const box = document.createElement("div");
    const draw = (shown) => render(html`<${Markdown} text=${shown} />`, box);
    const frame = () => new Promise((done) => requestAnimationFrame(done));
    document.querySelector(".messages").replaceChildren(box);
"""
# Grows an answer in 200 redraws, with layout, then its end by 8 characters in each of 40 more.
MEASURE = """
    const base = text.length - 320, lengths = [];
    for (let part = 1; part <= 200; part++) lengths.push(Math.floor(base * part / 200));
    for (let more = 8; more <= 320; more += 8) lengths.push(base + more);
    let kept = null, blocks = true;
    for (const [index, length] of lengths.entries()) {
        performance.mark(`begin ${index}`);
        draw(text.slice(0, length));
        box.offsetHeight;
        performance.mark(`end ${index}`);
        await frame();
        if (index === 10) {
            await new Promise((done) => setTimeout(done, 2000)); // KaTeX and a mode come
            kept = box.querySelector("em, li, .katex, .is-comment");
        }
        const isBlock = (part) => part.tagName && getComputedStyle(part).display !== "inline";
        blocks &&= [...box.firstChild.childNodes].every(isBlock);
    }
    return [kept !== null && kept.isConnected, blocks];
}"""
SET = """
    const count = () => box.querySelectorAll(".katex").length;
    draw("$a$");
    while (count() === 0) await frame();
    draw(text);
    const counts = [count()];
    while (counts.at(-1) < 500) (await frame(), counts.push(count()));
    return counts;
}"""


def test_redraws_of_large_answers(serve: Serve, opened: Open, tmp_path: Path) -> None:
    """Elements that were there stay, and all parts of an answer are block elements.

    When an inline element appears or goes, the browser recomputes the styles of all parts.
    """
    trace = tmp_path / "trace.json"
    with serve(FakeEngine(endless(300))) as client, opened(str(client.base_url)) as tab:
        tab.locator(".messages").wait_for()
        chromium = tab.context.browser
        for name, (text, _) in LARGE.items():
            chromium.start_tracing(page=tab, path=trace, categories=["-*", "blink.user_timing"])
            assert tab.evaluate(BEGIN + MEASURE, text) == [True, True], name
            chromium.stop_tracing()
            times = spent(json.loads(trace.read_text())["traceEvents"])
            for told, some in (("grows", times[:200]), ("its end grows", times[200:])):
                print(f"{name}, {told}: {median(some):.1f} ms, at most {max(some):.1f} ms")


def spent(events: list[dict[str, Any]]) -> list[float]:
    """Returns the main thread's processor time for each redraw, in milliseconds."""
    at = {event["name"]: event["tts"] / 1000 for event in events if "tts" in event}
    return [at[f"end {n}"] - at[f"begin {n}"] for n in range(sum("end " in name for name in at))]


def test_many_formulas_are_set_in_several_frames(serve: Serve, opened: Open) -> None:
    with serve(FakeEngine(endless(300))) as client, opened(str(client.base_url)) as tab:
        tab.locator(".messages").wait_for()
        counts = tab.evaluate(BEGIN + SET, "\n\n".join(FORMULAS))
        assert counts == sorted(counts) and 0 < counts[0] < counts[-1] // 2 and counts[-1] == 500
