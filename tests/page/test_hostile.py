"""Hostile text on the page is shown as text, and has no other effect."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.text.tokenizer import Tokenizer
from tests.page.conftest import Open
from tests.page.test_page import address, configure, finished, say
from tests.server.conftest import Serve
from tests.support.fake_engine import FakeEngine, FakeInfo, Output
from tests.support.wire_help import saying

pytestmark = pytest.mark.full

RUN = "window.pwned=1"
PAYLOADS = (
    f"<script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f'<iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    f"<body onload={RUN}>",
    f"<details open ontoggle={RUN}>",
    f"<input autofocus onfocus={RUN}>",
    f'<a href="javascript:{RUN}">x</a>',
    f"[click](javascript:{RUN})",
    f"[click](JaVaScRiPt:{RUN})",
    f"[click](data:text/html,<script>{RUN}</script>)",
    f"![x](javascript:{RUN})",
    "![x](https://example.com/x.png)",
    f'<https://example.com/"onmouseover={RUN}>',
    f"```html\n<script>{RUN}</script>\n```",
    f"| a |\n|---|\n| <img src=x onerror={RUN}> |",
    f"<style>@import 'https://example.com/x.css'</style><p style='color:red' onclick={RUN}>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={RUN}>",
    f"&lt;img src=x onerror={RUN}&gt; &#60;script&#62;{RUN}&#60;/script&#62;",
    f"[x]: javascript:{RUN}\n\n[x]",
    f'{{"__html": "<img src=x onerror={RUN}>", "dangerouslySetInnerHTML": 1}}',
    "> " * 5000 + "deep",
)


def test_hostile_text_stays_text(serve: Serve, tokenizer: Tokenizer, opened: Open) -> None:
    """Hostile text stays text in answers, reasoning, tools, model names, errors and titles."""
    assert len(PAYLOADS) >= 20
    nasty = f"<img src=x onerror={RUN}>"

    def harmless(tab: Any, payload: str) -> None:
        assert tab.evaluate("window.pwned") is None, payload
        bad = "script, img, iframe, object, embed, style, base, [onerror], :not(.katex *)[style]"
        assert tab.locator(f"#app :is({bad})").count() == 0, payload
        links = tab.locator("#app .markdown a").evaluate_all("all => all.map(a => a.protocol)")
        assert set(links) <= {"http:", "https:", "mailto:"}, payload

    said = iter(())

    def script(request: Request) -> Iterator[Output]:
        return saying(tokenizer, next(said)).script(request)

    engine = FakeEngine(script, FakeInfo(max_model_len=60_000))
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(serve(engine, model_name=nasty))
        tab = stack.enter_context(opened(address(client), fails="completions"))
        configure(tab, tools=json.dumps([{"name": nasty}]))
        for payload in PAYLOADS:
            call = json.dumps({"name": nasty, "arguments": {"x": payload}})
            for text in (payload, f"<tool_call>\n{call}\n</tool_call>"):
                said = iter([text])
                tab.get_by_role("button", name="New chat").first.click()
                say(tab, payload[:200])
                tab.locator(".figures").wait_for()
                if text == payload and "deep" not in payload:
                    words = re.sub(r"\W+", "", payload)
                    shown = tab.locator("article.assistant").inner_text()
                    assert RUN not in payload or RUN in shown or "javascript" in words.lower()
                harmless(tab, text)
            engine.refusal = InvalidRequestError(payload[:300])
            tab.get_by_role("button", name="Regenerate", exact=True).click()
            tab.locator(".failure").first.wait_for()
            harmless(tab, f"error {payload}")
            engine.refusal = None
        tab.goto(tab.url.partition("#")[0] + "#clients")
        tab.locator(".names").wait_for()
        assert nasty in tab.locator(".clients").inner_text()
        harmless(tab, "clients")


# Addresses that must not be opened or loaded, in every form that a link or an element can have.
ADDRESSES = (
    f"javascript:{RUN}",
    f"JaVa\tScRiPt:{RUN}",
    f"&#106;avascript:{RUN}",
    f"\x01javascript:{RUN}",
    "data:text/html;base64,PHNjcmlwdD4",
    f"vbscript:{RUN}",
    "file:///etc/passwd",
    "blob:http://127.0.0.1/x",
)
FORMS = (
    "[x]({})",
    "![x]({})",
    "<{}>",
    "[x]: {}\n\n[x]",
    '<a href="{}" onclick="window.pwned=1">x</a>',
    '<img src="{}" onerror="window.pwned=1">',
)
FORMULAS = (
    rf"\href{{javascript:{RUN}}}{{x}}",
    rf"\url{{javascript:{RUN}}}",
    r"\includegraphics{https://example.com/x.png}",
    rf"\includegraphics[alt=x]{{x onerror={RUN}}}",
    r"\htmlClass{composer}{x}",
    r"\htmlId{app}{x}",
    r"\htmlStyle{position: fixed; inset: 0}{x}",
    rf"\htmlData{{onclick={RUN}}}{{x}}",
    rf"\text{{<img src=x onerror={RUN}>}}",
    r"\color{red; background: url(https://example.com/x)} x",
    r"\textcolor{url(https://example.com/x)}{x}",
    r"\def\x{\x\x}\x",
    r"\gdef\alpha{stolen} x",
    r"\rule{9999em}{9999em}",
    r"\kern-40em\raise{-50em}{x}\rlap{over the others}",
    r"\kern-30em \colorbox{red}{Delete}",
    "{" * 1500 + "x" + "}" * 1500,
    r"\frac{" * 400 + "x" + "}{y}" * 400,
    "x^{" * 900 + "x" + "}" * 900,
    r"\left(" * 600 + r"\right)" * 600,
    r"\begin{matrix}" + "&" * 1500 + r"\end{matrix}",
    r"\char`\<script\char`\>",
)
NAMES = ("__proto__", "constructor", "../../app", "javascript:1", "html onload=x", 'python"><img>')
CODES = tuple(f"```{name}\n<script>{RUN}</script>\n<img src=x onerror={RUN}>" for name in NAMES)
KINDS = "html xml js ts py c cpp java go rust sh sql css yaml toml json ruby swift lua r perl diff"


def test_hostile_links_formulas_and_code(serve: Serve, tokenizer: Tokenizer, opened: Open) -> None:
    nasty = f"<script>{RUN}</script>\n'\"`${{\\<!--/*" + "(" * 500 + "\n" + "/" * 3000 + "\n\t\x00"
    links = [form.format(each) for each in ADDRESSES for form in FORMS]
    formulas = [f"${f}$ and\n\n$$\n{f}\n$$\n" for f in FORMULAS]
    codes = [*CODES, *(f"```{kind}\n{nasty}" for kind in KINDS.split())]
    assert len(links) == 48
    nodes: dict[str, Any] = {}
    for number, content in enumerate([*links, *formulas, *codes, r"$\alpha$"]):
        more = {"reasoning": "", "calls": [], "steps": [], "state": "done"}
        parent = f"b{number - 1}" if number else None
        nodes[f"a{number}"] = {"role": "user", "content": "?", "parent": parent}
        nodes[f"b{number}"] = {
            "role": "assistant",
            "content": content,
            "parent": f"a{number}",
        } | more
    for name, node in nodes.items():
        node["id"] = name
    chat = {"id": "c", "title": "c", "at": 1, "settings": {}, "nodes": nodes, "leaf": name}
    engine = saying(tokenizer, "Yes.")
    engine.info = FakeInfo(max_model_len=600_000)
    with serve(engine) as client, opened(address(client)) as tab:
        tab.evaluate("c => localStorage.setItem('mlx-mtp.chat.c', JSON.stringify(c))", chat)
        tab.reload()
        tab.locator("article.assistant").nth(len(nodes) // 2 - 1).wait_for()
        tab.locator("article.assistant").last.locator(".katex").wait_for()
        tab.locator(".is-comment").first.wait_for()
        assert tab.evaluate("window.pwned") is None
        bad = "script, img, iframe, object, embed, style, base, .katex a, [id=app] [id=app]"
        assert tab.locator(f"#app :is({bad}, :not(.katex *)[style])").count() == 0
        named = tab.locator("#app *").evaluate_all(
            "all => [...new Set(all.flatMap(e => e.getAttributeNames()))]"
        )
        assert not [each for each in named if each.startswith("on")]
        found = tab.locator("#app .markdown a").evaluate_all("all => all.map(a => a.protocol)")
        assert set(found) <= {"http:", "https:", "mailto:"}
        # Formulas share no macros, and a formula stays within its answer.
        assert "stolen" not in tab.locator("article.assistant").last.inner_text()
        styles = tab.locator(".katex [style]").evaluate_all("all => all.map(e => e.style.cssText)")
        assert not [each for each in styles if re.search("url|position: *fixed", each)]
        assert tab.evaluate("document.elementFromPoint(60, 300).closest('.conversations') !== null")
        clip = "e => getComputedStyle(e).overflow"
        assert tab.locator(".markdown").first.evaluate(clip) == "clip"
        say(tab, "hi")
        assert finished(tab) == "Yes."
