"""The documents agree with the code, and each test that they name exists."""

import importlib
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import flags_doc
import pytest
from memory_guide import tables

import benchmarks.__main__ as bench
from mlx_mtp.cli.main import _parser
from mlx_mtp.config import ServerConfig
from mlx_mtp.options import SERVE_FLAGS

ROOT = Path(__file__).parents[1]


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


FLAGS = {flag.name: flag for flag in SERVE_FLAGS}
# Flags of the other commands.
OTHERS = {"--mlx-model-path", "--source-model", "--verify", "--force", "--dry-run"}
OTHERS |= {"--write", "--offline", "--memory", "--no-enable-mtp", "--no-vision"}


def test_the_page_of_flags_is_made_from_the_flags():
    made = flags_doc.page()
    assert all(f"| `{name}" in made for name in FLAGS if name.startswith("-"))
    assert text_of("docs/flags.md") == made, "run: python scripts/flags_doc.py > docs/flags.md"


@pytest.mark.parametrize("page", ["README.md", "docs/troubleshooting.md", "docs/memory.md"])
def test_no_page_names_a_flag_that_is_not_there(page):
    assert set(re.findall(r"`(--[a-z-]+)", text_of(page))) <= FLAGS.keys() | OTHERS


def test_the_tables_of_memory():
    readme, *others = tables()
    pages = text_of("README.md"), text_of("docs/memory.md")
    for table, page in ((readme, pages[0]), *((other, pages[1]) for other in others)):
        assert table in page, "run: python scripts/memory_guide.py"


def test_the_help_of_the_tables_script_is_no_table(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory_guide.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "scripts/memory_guide.py"), run_name="__main__")
    assert "usage: memory_guide.py" in (shown := capsys.readouterr().out) and "| --- |" not in shown


def test_api_lists_what_is_accepted_without_effect():
    section = text_of("docs/api.md").partition("## Accepted without effect\n")[2]
    section = section.partition("\n## ")[0]
    parameters = json.loads(text_of("tests/data/sdk_parameters.json"))
    ignored = {
        name
        for reasons in parameters.values()
        for reason, names in reasons.items()
        if not reason.startswith("tests/")
        for name in names
    }
    assert len(ignored) >= 10
    for name in ignored:
        path, _, value = name.partition("=")
        kind = re.search(r"\(([a-z_]+)\)", path) if path.startswith("tools") else None
        field = kind[1] if kind else re.sub(r"\[\]|\(.*?\)", "", path).rpartition(".")[2]
        assert re.search(rf"`(?:[a-z_]+\.)*{field}\b", section), f"{field} is missing"
        if value and value not in ("false", "true"):
            assert re.search(rf"\b{value}\b", section), f"{value} of {field} is missing"


def test_the_paths_that_are_named_are_there():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    paths = {
        path
        for page in pages
        for path in re.findall(
            r"`((?:benchmarks|docs|mlx_mtp|scripts|tests)/[\w./*-]+)`", page.read_text("utf-8")
        )
        # These are files of other projects.
        if not path.startswith(("tests/api_resources", "tests/entrypoints"))
    }
    (late,) = re.findall(r'"\{(.+)\}\.py" = \["E402"\]', text_of("pyproject.toml"))
    paths |= {f"{path}.py" for path in late.split(",")}
    assert len(paths) >= 50
    assert [path for path in sorted(paths) if not any(ROOT.glob(path))] == []


def test_each_promise_has_tests_that_are_there():
    promises, _, tests = text_of("docs/reliability.md").partition("\n## The test ")
    rows = re.findall(r"^\| ([A-Z][0-9]+) \| (.+) \|$", tests, re.MULTILINE)
    names = re.findall(r"^\| ([A-Z][0-9]+) \|", promises, re.MULTILINE)
    names += re.findall(r"\*\*(P[0-9]+)[,:]", text_of("SECURITY.md"))
    assert len(names) >= 60
    assert [promise for promise, _ in rows] == names
    for promise, named in rows:
        source = ""
        for name in re.findall(r"`([^`]+)`", named):
            if name.startswith("tests/"):
                source = text_of(name)
            else:
                assert re.search(rf"^(?:async )?def {name}\(", source, re.MULTILINE), name
        assert source, f"{promise}: a file comes first"


def test_the_bounds_of_security():
    rows = re.findall(
        r"^\| ([^|]+) \| ([0-9.]+) \| `([^`]+)` \|$", text_of("SECURITY.md"), re.MULTILINE
    )
    assert len(rows) >= 25
    for what, bound, name in rows:
        if name.startswith("--"):
            value = FLAGS[name].default
        elif name.startswith("config.ServerConfig."):
            value = getattr(ServerConfig("m"), name.rpartition(".")[2])
        else:
            module, _, constant = name.rpartition(".")
            value = getattr(importlib.import_module(f"mlx_mtp.{module}"), constant)
        assert value == float(bound), what


def test_the_way_of_a_request_is_that_of_the_code():
    section = text_of("docs/architecture.md").partition("## The way of a request")[2]
    rows = re.findall(r"^\| (`.*?) \| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    assert 20 <= len(rows) <= 30
    assert set(re.findall(r"\*\*(T\d+)\*\*", section)) == {"T1", "T2", "T3", "T4"}
    for modules, functions in rows:
        source = "".join(text_of(f"mlx_mtp/{name}.py") for name in re.findall("`(.+?)`", modules))
        for name in re.findall("`(.+?)`", functions):
            for part in name.split("."):
                assert re.search(rf"(?:class|def) {part}\b", source), f"{modules}: {name}"


# Commands of other programs in the documents, and the test that runs each, or None if none can.
RUN_BY = {
    "ANTHROPIC_BASE_URL=": "tests/clients/test_agents.py",
    "OPENAI_API_BASE_URL=": "tests/clients/test_open_webui.py",
    "curl ": "tests/test_terminal.py",
    "git clone ": None,  # no address yet
    "lm_eval ": "tests/clients/test_lm_eval.py",
    "pipx ": "tests/test_wheel.py",
}


def commands() -> list[tuple[str, bool]]:
    """Returns the commands in the documents' code blocks (True) and within their text (False)."""
    found = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        text = page.read_text("utf-8") if page.name != "CHANGELOG.md" else ""
        blocks = r"(?s)```(?:sh|console)\n(.*?)```"
        for block in re.findall(blocks, text):
            lines = re.sub(r"(?s)<<END\n.*?\nEND\n", "\n", block.replace("\\\n", "")).splitlines()
            found += [(line.removeprefix("$ "), True) for line in lines if line]
        named = r"`((?:mlx-mtp|python -m benchmarks) [^`\n]+)`"
        found += [(each, False) for each in re.findall(named, re.sub(blocks, "", text))]
    return found


def check_command(line: str, whole: bool) -> None:
    """Raises AssertionError or SystemExit if an argument, file or target does not exist."""
    line = re.sub(r"\[(\w+)(\|\w+)?\]", r"\1", line)  # optional arguments
    words = shlex.split(line.rpartition("| ")[2], comments=True)
    words = [{"COMMAND": "serve", "NAME": "opencode"}.get(word, word) for word in words]
    words = [re.sub(r"^(\.venv/bin/)?python$", "python", word) for word in words if word != "..."]
    while "=" in words[0] and words[0].startswith("MLX_MTP_"):
        words.pop(0)
    if words[0] == "mlx-mtp":
        if whole or len(words) > 2:
            _parser().parse_args(words[1:])
        else:
            assert words[1] in {"--version", *_parser()._subparsers._group_actions[0].choices}
    elif words[:3] == ["python", "-m", "benchmarks"]:
        if words[3] != "opencode":
            module = importlib.import_module(f"benchmarks.{bench.scenarios()[words[3]][0]}")
            bench.parser_of(words[3], getattr(module, words[3])).parse_args(words[4:])
    elif words[:3] == ["python", "-m", "pytest"]:
        path, _, test = words[3].partition("::")
        assert (ROOT / path).exists() and f"def {test}" in (text_of(path) if test else "def ")
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", text_of("Makefile"), re.MULTILINE)
    else:
        (test,) = (by for prefix, by in RUN_BY.items() if line.startswith(prefix))
        assert test is None or (ROOT / test).exists()


def test_each_command_of_the_documents_is_one():
    found = sorted(set(commands()))
    assert len(found) > 80
    for line, whole in found:
        try:
            check_command(line, whole)
        except BaseException as error:
            raise AssertionError(line) from error


@pytest.mark.parametrize(
    "line", ["mlx-mtp serve --prot 1", "make tests", "python -m benchmarks nothing", "curlew x"]
)
def test_a_command_that_is_none_is_found(line):
    with pytest.raises((AssertionError, SystemExit, KeyError, ValueError)):
        check_command(line, True)
