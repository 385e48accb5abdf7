"""The page's Markdown in Node.js: what is shown, and how much is read for it."""

import json
import random
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


def read(folder: Path, texts: list[list[str]]) -> list[tuple[str, str, int, int]]:
    """For each text, in pieces: what is shown in the end, and of all at once; characters read."""
    page = shutil.copytree(FOLDER, folder / "page")
    command = ["node", str(Path(__file__).with_name("markdown.mjs")), str(page)]
    asked = json.dumps(texts)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[tuple[str, str, int, int]] = json.loads(done.stdout)
    return found


def test_hostile_text_takes_bounded_work_and_is_shown(tmp_path: Path) -> None:
    found = read(tmp_path, [[text] for text in HOSTILE.values()])
    for (name, text), (_, shown, _, num_read) in zip(HOSTILE.items(), found, strict=True):
        # Levels multiply the length, marks at most the bound of a paragraph.
        assert num_read < 30 * len(text) + 5_000_000, name
        assert shown.count("a") >= text.count("a"), name


def test_a_growing_text_is_shown_as_the_whole_and_read_about_once(tmp_path: Path) -> None:
    drawn = random.Random(39)
    texts = [drawn.choices(PARTS, k=drawn.randint(3, 30)) for _ in range(1500)]
    block = "Some *text* here.\n\n- one\n- two\n\n```\ncode\n\ncode\n```\n\n| a |\n|---|\n| b |\n\n"
    end = ("And [a link], [a link].\n\n", "[a link]: http://x", ".example\n")
    texts.append([*([block] * 200), *end])
    found = read(tmp_path, texts)
    for pieces, (grown, whole, _, _) in zip(texts, found, strict=True):
        assert grown == whole, "".join(pieces)
    assert 'href="http://x.example"' in found[-1][0] and found[-1][0].count("<table>") == 200
    assert found[-1][2] < 10 * found[-1][3]
