"""What the Live view shows for given messages of /live: the number of drafts, several models."""

import json
from typing import Any

import pytest

from mlx_mtp.server.merged import merged_live
from tests.page.conftest import Open
from tests.page.test_page import address
from tests.server.conftest import Serve
from tests.support.fake_engine import FakeEngine, endless

pytestmark = pytest.mark.full

SERVER = {"state": "ready", "reason": None, "version": "1", "uptime": 5.0, "models": ["m"]}
SERVER |= {"context": 1000, "most_rows": 4, "drafts": "auto", "restarts": 0}
# Two rows: the times of a step and its tokens, by the number of the head's drafts per row.
CURVE = {"num_rows": 2, "costs": [1.0, 1.25, 2.0], "tokens": [2.0, 3.5, 4.0]}
SPEEDS = [1.0, 1.4, 1.0]
# The server's setting and choice, the marked bar (None: no chart), and the text that is shown.
CASES = {
    "two each": ("auto", ({"mtp": 4}, 2.0, 4.0), 2, "checks 4 drafts of the MTP head. It takes 2"),
    "one each": ("auto", ({"mtp": 2}, 1.25, 3.5), 1, "1.75 times as many tokens: 1.40 times the"),
    "none pay": ("auto", ({}, 1.0, 2.0), 0, "For 2 answers at a time nothing is drafted"),
    "copies": ("auto", ({"copy": 5}, 1.5, 6.0), -1, "5 drafts copied from earlier text. It"),
    "both": ("auto", ({"mtp": 2, "copy": 1}, 2.0, 4.0), -1, "2 drafts of the MTP head and 1 draft"),
    "no step": ("auto", None, None, "No step has been planned yet."),
    "fixed": (3, None, None, "--mtp-num-draft-tokens 3 fixes the number of drafts"),
    "no drafts": (None, None, None, "Nothing is drafted"),
}


def test_live_says_why_so_many_drafts_and_has_no_figures_without_a_model(
    serve: Serve, opened: Open
) -> None:
    message: dict[str, Any] = {}

    def answer(route: Any) -> None:
        body = f"data: {json.dumps(message)}\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    with serve(FakeEngine(endless(300))) as client, opened(address(client)) as tab:
        tab.route("**/live", answer)
        card = tab.locator(".card", has_text="Why so many drafts")
        for name, (setting, chosen, marked, told) in CASES.items():
            message = merged_live({}) | {"server": SERVER | {"drafts": setting}}
            if chosen is not None:
                fields = dict(zip(("drafts", "cost", "num_tokens"), chosen, strict=True))
                message["drafts"] = {"sources": {}, "choice": CURVE | fields}
            tab.goto("about:blank")
            tab.goto(f"{address(client)}/#live")
            assert told in card.inner_text(), (name, card.inner_text())
            bars = card.locator("svg g").all()
            assert [b.locator("text").all_text_contents() for b in bars] == (
                [] if marked is None else [[f"{s:.2f}", str(k)] for k, s in enumerate(SPEEDS)]
            )
            shown = [b.get_attribute("class") == "in-use" for b in bars]
            assert shown == [k == marked for k in range(len(bars))], name
            heights = [float(b.locator("rect").get_attribute("height")) for b in bars]
            most = max(heights, default=0)
            assert heights == pytest.approx([most * s / 1.4 for s in SPEEDS[: len(bars)]])
        states = {"small": "on disk", "large": "loading"}
        message = merged_live({}) | {"server": SERVER | {"context": 0, "states": states}}
        tab.goto("about:blank")
        tab.goto(f"{address(client)}/#live")
        tab.get_by_text("No model is in memory").wait_for()
        assert "small (on disk), large (loading)" in tab.locator("main").inner_text()
        assert tab.locator(".charts, meter, .bars").count() == 0
