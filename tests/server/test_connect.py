"""`mlx-mtp connect`: what is printed, what is written, and what is left as it was."""

import json
import os
import re
import stat
import subprocess
import tomllib

import pytest
from ruamel.yaml import YAML

from mlx_mtp.cli.main import main
from mlx_mtp.connect.clients import CLIENTS, TEXTS, Served
from mlx_mtp.connect.command import NAMES
from mlx_mtp.connect.files import merged_text
from tests.server.conftest import MODEL
from tests.support.fake_engine import FakeEngine, answer

FILES = {
    "opencode": ".config/opencode/opencode.json",
    "claude": ".claude/settings.json",
    "codex": ".codex/config.toml",
    "continue": ".continue/config.yaml",
    "aider": ".aider.conf.yml",
    "qwen": ".qwen/settings.json",
    "zed": ".config/zed/settings.json",
}
OLD = {
    "opencode": '{"theme": "dark", "provider": {"other": {"name": "o"}, "mlx-mtp": {"x": 1}}}',
    "claude": '{"env": {"FOO": "1"}, "permissions": {"allow": ["Bash"]}}',
    "codex": (
        '# mine\nmodel = "gpt-5" # best\n\n[model_providers.other]\nname = "o"\n\n'
        "[projects.'/x']\ntrust_level = \"trusted\"\n"
    ),
    "continue": (
        "# mine\nname: Me\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: other # best\n"
        "    provider: ollama\n    model: llama\n"
        f"  - name: 'mlx-mtp: {MODEL}'\n    model: old\nrules:\n  - Be kind\n"
    ),
    "aider": "# mine\ndark-mode: true\n",
    "qwen": '{"modelProviders": {"other": [{"id": "o"}]}, "ui": {"theme": "x"}}',
    "zed": '{"agent": {"tool": 1}, "language_models": {"ollama": {"x": 1}}}',
}
KEY = "secret-kéy"


@pytest.fixture(scope="module")
def urls(serve):
    """The addresses of a server without a key, and of one that requires a key."""
    one, other = (FakeEngine(answer([300])) for _ in range(2))
    with serve(one) as free, serve(other, api_keys=(KEY,)) as locked:
        yield [str(client.base_url).rstrip("/") for client in (free, locked)]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "CONTINUE_GLOBAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def connect(urls, home, capsys):
    """Returns a function that runs the command: its output, or its errors if it should fail."""

    def run(client, *flags, url=urls[0], status=0, **environ):
        assert main(["connect", client, "--url", url, *flags], os.environ | environ) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return run


def load(path):
    text = path.read_text()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if path.suffix == ".json" else YAML(typ="safe").load(text)


def undo(said):
    """Run the undo line that the command printed."""
    line = next(line for line in said.splitlines() if line.startswith("To undo this: "))
    subprocess.run(["sh", "-c", line.removeprefix("To undo this: ")], check=True)


@pytest.mark.parametrize("client", FILES)
def test_a_new_file(connect, home, client, urls):
    path, url = home / FILES[client], urls[0]
    printed = connect(client)
    assert not any(home.iterdir())
    said = connect(client, "--write", url=f"{url}/v1/")
    text, config = path.read_text(), load(path)
    # The printed text is the file's content, below a comment with the file's path.
    mark = "//" if path.suffix == ".json" else "#"
    before, _, body = printed.partition(f"{mark} {path}\n")
    assert body.partition("Set MLX_MTP_API_KEY")[0].strip() == text.strip()
    assert bool(before) == (client == "claude")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = set(re.findall(r'http://[^"]+', json.dumps(config)))
    assert found == {url if client == "claude" else f"{url}/v1"}
    assert MODEL in json.dumps(config)
    assert list(path.parent.iterdir()) == [path]
    # A second run changes nothing, and keeps a backup.
    connect(client, "--write")
    assert load(path) == config
    assert path.with_name(path.name + ".bak").read_text() == text
    undo(said)
    assert not path.exists()


@pytest.mark.parametrize(("client", "path"), FILES.items())
def test_what_else_is_in_the_file_stays(connect, home, client, path):
    path = home / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OLD[client])
    path.chmod(0o640)
    before = load(path)
    printed = connect(client, "--write")
    assert path.with_name(path.name + ".bak").read_text() == OLD[client]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    after, text = load(path), path.read_text()
    assert text.count("# mine") == OLD[client].count("# mine")
    if client == "continue":
        assert after["models"][0] == before["models"][0]
        assert [model["model"] for model in after.pop("models")] == ["llama", MODEL]
        del before["models"]
    elif client == "codex":
        assert after.pop("model") == MODEL != before.pop("model")
    elif client == "claude":
        assert after["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "1024"
    assert contains(after, before)
    undo(printed)
    assert path.read_text() == OLD[client]
    # A file that can't be read is left unchanged.
    for wrong in ("{ // a comment\n [", "[]" if path.suffix != ".toml" else "a = "):
        path.write_text(wrong)
        there = set(path.parent.iterdir())
        assert str(path) in connect(client, "--write", status=2)
        assert path.read_text() == wrong
        assert set(path.parent.iterdir()) == there


@pytest.mark.parametrize("client", CLIENTS)
def test_a_model_that_sees_written_again_changes_nothing(client, tmp_path):
    path = tmp_path / CLIENTS[client].where[2]
    config = CLIENTS[client].config(Served("http://a", "m", 1024, True, sees=True))
    texts = []
    for _ in range(2):
        texts.append(merged_text(path, config, CLIENTS[client].needed))
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[-1])
    assert texts[0] == texts[1]


def contains(whole, part):
    if not isinstance(part, dict):
        return whole == part
    return all(contains(whole[key], value) for key, value in part.items())


def test_where_a_client_keeps_its_files(connect, home):
    real, link = home / "dotfiles.json", home / FILES["claude"]
    real.write_text("{}")
    link.parent.mkdir()
    link.symlink_to(real)
    connect("claude", "--write")
    assert link.is_symlink() and "env" in load(real)
    connect("codex", "--write", CODEX_HOME=str(home / "elsewhere"))
    assert os.listdir(home / "elsewhere") == ["config.toml"]


def test_keys_are_never_written(urls, connect):
    more = {"url": urls[1], "status": 2}
    assert "requires its API key" in connect("codex", **more)
    assert "refuses" in connect("codex", "--api-key", "wrong", **more)
    assert "leave out --write" in connect("open-webui", "--write", status=2)
    assert (*CLIENTS, *TEXTS) == NAMES
    for name in NAMES:
        said = connect(name, url=urls[1], MLX_MTP_API_KEY=KEY)
        variable = "OPENAI_API_KEY" if name == "aider" else "MLX_MTP_API_KEY"
        assert KEY not in said and "none" not in said
        assert said.count(variable) >= (1 if name in ("aider", "zed") else 2)
        assert not re.search(r"\{\}|None", said)
    # Zed does nothing without a key.
    for more in ((), ("--write",)):
        assert "Set MLX_MTP_API_KEY where the client runs, to any text" in connect("zed", *more)


def test_what_is_typed_for_llm_works_in_a_shell(connect, tmp_path):
    """The printed lines work with a command `llm` that prints where its files are."""
    (tmp_path / "llm").write_text(f"#!/bin/sh\necho {tmp_path}/logs.db\n")
    (tmp_path / "llm").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", connect("llm")], check=True, env=os.environ | {"PATH": path})
    (model,) = YAML(typ="safe").load(tmp_path / "extra-openai-models.yaml")
    assert (model["model_id"], model["model_name"]) == ("mlx-mtp", MODEL)


def test_no_server(connect, capsys):
    nowhere, wrong = ("127.0.0.1:1", "http://127.0.0.1:1", "x y"), ("ftp://x", "http://")
    for words, urls in (("No server answers", nowhere), ("is not an address", wrong)):
        for url in urls:
            error = connect("codex", url=url, status=2)
            assert error.startswith("mlx-mtp: ") and words in error
    assert main(["connect", "codex", "127.0.0.1:1"], os.environ) == 2
    assert "No server answers" in capsys.readouterr().err
