"""The page's Markdown in Node.js: what it shows, and how many characters it reads."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlx_mtp.server.page import FOLDER

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")

PARTS = (
    *("a", "b c", " ", "\n", "\n\n", "\t", "\r\n", "- ", "* ", "1. ", "2. ", "> ", "# ", "    "),
    *(
        "```",
        "\n```\n",
        "*",
        "**",
        "_",
        "`",
        "~~",
        "\\",
        "[a]",
        "[a]",
        "[a]: /u",
        "v\n",
        "(b)",
        "![",
        "&lt;",
    ),
    *("|", "|-|", "---", "===", "<b>", "<div>", "</div>", "https://a.b"),
    *("$", "$$", "$$\n", "\n$$\n", "$x$", "\\(", "\\)", "\\[\n", "\\]", "~~~", "````\n", "5"),
)
HOSTILE = {
    "emphasis": "*a" * 10_000,
    "nested emphasis": "**a " * 2500 + " b**" * 2500,
    "words with underscores": "a_" * 10_000,
    "nested lists": "\n".join(f"{'  ' * level}- a" for level in range(300)),
    "nested quotes": "> " * 5000 + "deep",
    "a heading of spaces": f"# a{' ' * 20_000}b",
}


CODE = "```python\n" + "".join(f"    value_{n} = f(x, {n})  # note\n" for n in range(5000))
FORMULAS = [f"So $x_{{{n}}} = \\frac{{{n}}}{{y}}$ and ({n}) " for n in range(500)]
# Large answers, and the maximum number of characters that a redraw of their second half can read.
# A redraw searches a whole paragraph for its end, and reads the paragraph's text in runs.
LARGE = {
    "emphasis": (HOSTILE["emphasis"], 20_000 + 2_000_000),
    "nested lists": (HOSTILE["nested lists"], 3 * 91_000),
    "code": (CODE, 0),
    "formulas in a paragraph": ("".join(FORMULAS), 25_000 + 400_000),
    "formulas in paragraphs": ("\n\n".join(FORMULAS), 10_000),
    "formulas of their own": ("".join(f"$$\n{n} + x\n$$\n\n" for n in range(500)), 10_000),
}


def read(folder: Path, texts: list[list[str]]) -> list[tuple[str, str, int, int, int, int]]:
    """Returns the output of `markdown.mjs` for each text, which is given in pieces."""
    page = shutil.copytree(FOLDER, folder / "page")
    command = ["node", str(Path(__file__).with_name("markdown.mjs")), str(page)]
    asked = json.dumps(texts)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[tuple[str, str, int, int, int, int]] = json.loads(done.stdout)
    return found


def test_hostile_text_takes_bounded_work_and_is_shown(tmp_path: Path) -> None:
    found = read(tmp_path, [[text] for text in HOSTILE.values()])
    for (name, text), (_, shown, _, num_read, *_) in zip(HOSTILE.items(), found, strict=True):
        # Levels multiply the length; marks multiply at most the maximum length of a paragraph.
        assert num_read < 30 * len(text) + 5_000_000, name
        assert shown.count("a") >= text.count("a"), name


def test_a_growing_text_is_shown_as_the_whole_and_read_about_once(tmp_path: Path) -> None:
    drawn = random.Random(39)
    texts = [drawn.choices(PARTS, k=drawn.randint(3, 30)) for _ in range(1500)]
    block = "Some *text* here.\n\n- one\n- two\n\n```\ncode\n\ncode\n```\n\n| a |\n|---|\n| b |\n\n"
    end = ("And [a link], [a link].\n\n", "[a link]: http://x", ".example\n")
    texts.append([*([block] * 200), *end])
    found = read(tmp_path, texts)
    for pieces, (grown, whole, *_) in zip(texts, found, strict=True):
        assert grown == whole, "".join(pieces)
    assert 'href="http://x.example"' in found[-1][0] and found[-1][0].count("<table>") == 200
    assert found[-1][2] < 10 * found[-1][3]


def test_a_redraw_of_a_large_answer_reads_its_changed_tail(tmp_path: Path) -> None:
    texts = [text for text, _ in LARGE.values()]
    size = 1000
    found = read(tmp_path, [[t[n : n + size] for n in range(0, len(t), size)] for t in texts])
    for (name, (_, limit)), (grown, whole, _, _, most, lines) in zip(
        LARGE.items(), found, strict=True
    ):
        assert grown == whole, name
        assert most <= limit, (name, most)
        assert lines <= 1, name  # besides the new lines, the unfinished one


def test_prices_and_code_are_no_formulas(tmp_path: Path) -> None:
    """Only formulas are shown as such, with the text between their marks."""
    told = {
        "It costs $5 and $7, US$3 or $9-$12, not 5$.": [],
        "From $5, to 10$ or $20/30$.": [],
        "`$x$` and ``\\(a\\)``\n\n```\n$$y$$\n```\n\n    $z$": [],
        r"An escaped \$x$ and $ x$ and $x $": [],
        r"$x$, $$y$$, \(z\) and \[w\]": ["x", "y", "z", "w"],
        r"$\$5 + x$": [r"\$5 + x"],
        "So\n$$\na\n- b\n$$\nis": ["\na\n- b\n"],
        "So\n\n$$\na\n$$": ["\na\n"],
        "$$a\n\nb$$": [],
        "- $x$\n- \\[\n  y\n  \\]": ["x", "\ny\n"],
        "| $x$ |\n|---|\n| $a|b$ |": ["x"],
    }
    found = read(tmp_path, [[text] for text in told])
    for (text, formulas), (shown, *_) in zip(told.items(), found, strict=True):
        assert re.findall(r"(?s)<Formula[^>]*>(.*?)</Formula>", shown) == formulas, text
