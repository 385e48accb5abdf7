"""Every view of the page fits at five widths and at twice the size, and axe finds no fault."""

from pathlib import Path
from typing import Any

import pytest

from tests.clients.npm import installed
from tests.page.conftest import Open
from tests.page.test_page import answered
from tests.support.process import Server

pytestmark = pytest.mark.full

RICH = """The *price* is $5, and $E = mc^2$.

$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$$

```python
def f(x: int) -> str:  # a comment
    return "text" * (x + 1)
```

| a | b |
|---|---|
| `c` | $\\alpha$ |
"""


def check_with_axe(tab: Any, where: str) -> None:
    source = installed(Path(__file__).parent) / "node_modules" / "axe-core" / "axe.min.js"
    tab.evaluate(source.read_text("utf-8"))
    found = tab.evaluate("axe.run(document)")["violations"]
    told = [(f["impact"], f["id"], [n["html"] for n in f["nodes"]][:3]) for f in found]
    assert not told, (where, told)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 740), (768, 740), (412, 740), (390, 740), (360, 740)])
def test_every_view_fits_and_reads_well(
    mtp_server: Server, opened: Open, scheme: str, size: tuple[int, int]
) -> None:
    look(mtp_server, opened, size, color_scheme=scheme)


def test_every_view_fits_at_twice_the_size(mtp_server: Server, opened: Open) -> None:
    """The views fit in 1280 x 740 pixels at a zoom of 200%."""
    look(mtp_server, opened, (640, 370), device_scale_factor=2)


def look(server: Server, opened: Open, size: tuple[int, int], **more: Any) -> None:
    width, height = size
    view = {"width": width, "height": height}
    with opened(server.url, viewport=view, **more) as tab:

        def check(where: str) -> None:
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, where
            check_with_axe(tab, where)

        check("an empty chat")
        answered(tab)
        check("chat")
        tab.locator("article.assistant").get_by_role("button", name="Edit").click()
        check("an edited answer")
        tab.get_by_label("The answer as it should be").fill(RICH)
        tab.get_by_role("button", name="Keep").click()
        tab.locator(".katex").nth(2).wait_for()
        tab.locator(".is-keyword").first.wait_for()
        check("formulas and code")
        tab.get_by_role("button", name="Raw text").click()
        check("raw text")
        files = {"name": "a.py", "mimeType": "", "buffer": b"print(1)"}
        tab.locator(".composer input[type=file]").set_input_files(files)
        tab.locator(".composer .attached").wait_for()
        check("files")
        tab.get_by_role("button", name="Remove a.py").click()
        tab.get_by_role("button", name="More").click()
        check("the menu")
        tab.get_by_role("button", name="Shortcuts").click()
        check("the shortcuts")
        tab.keyboard.press("Escape")
        if width < 800:
            tab.get_by_role("button", name="Chats").click()
            check("chats")
            tab.get_by_role("link", name="Set up a client").click()
            tab.get_by_role("link", name="Chat").click()
        tab.get_by_role("button", name="Earlier version").click()
        tab.get_by_role("switch").check()
        tab.locator(".of-step").nth(2).click()
        check("drafts")
        tab.get_by_role("button", name="Settings", exact=True).click()
        check("settings")
        for name, mark in (("Live", ".charts"), ("Set up a client", ".names")):
            tab.get_by_role("link", name=name).click()
            tab.locator(mark).wait_for()
            for each in tab.locator("main summary").all():
                each.click()
            check(name)
        # Navigation by keyboard alone.
        tab.goto(f"{server.url}#live")
        tab.reload()
        tab.locator(".charts").wait_for()
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
        tab.keyboard.press("Enter")
        assert tab.evaluate("document.activeElement.id") == "main"
