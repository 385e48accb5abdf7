"""`mlx-mtp connect`: what is printed, what is written, and what is left as it was."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import tomllib

import pytest
from ruamel.yaml import YAML

from mlx_mtp.cli import main
from tests.server.conftest import MODEL
from tests.server.fake_engine import FakeEngine, answer

FILES = {
    "opencode": ".config/opencode/opencode.json",
    "claude": ".claude/settings.json",
    "codex": ".codex/config.toml",
    "continue": ".continue/config.yaml",
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
}


@pytest.fixture(scope="module")
def url(serve):
    with serve(FakeEngine(answer([300]))) as client:
        yield str(client.base_url).rstrip("/")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "CONTINUE_GLOBAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def connect(url, home, capsys):
    """Status, standard output and standard error of a run."""

    def run(client, *flags, url=url):
        status = main(["connect", client, "--url", url, *flags])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def load(path):
    text = path.read_text()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if path.suffix == ".json" else YAML(typ="safe").load(text)


def undo(said):
    """Run the line that the command printed for this."""
    line = next(line for line in said.splitlines() if line.startswith("To undo this: "))
    subprocess.run(["sh", "-c", line.removeprefix("To undo this: ")], check=True)


@pytest.mark.parametrize("client", FILES)
def test_a_new_file(connect, home, client, url):
    path = home / FILES[client]
    status, printed, _ = connect(client)
    assert status == 0
    assert not any(home.iterdir())
    status, said, _ = connect(client, "--write", url=f"{url}/v1/")
    assert status == 0
    text, config = path.read_text(), load(path)
    before, _, body = printed.partition(f"# {path}\n")
    assert body.strip() == text.strip()
    assert bool(before) == (client == "claude")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    urls = set(re.findall(r'http://[^"]+', json.dumps(config)))
    assert urls == {url if client == "claude" else f"{url}/v1"}
    assert MODEL in json.dumps(config)
    assert list(path.parent.iterdir()) == [path]
    # Once more: nothing changes, and what was there is kept.
    assert connect(client, "--write")[0] == 0
    assert load(path) == config
    assert path.with_name(path.name + ".bak").read_text() == text
    undo(said)
    assert not path.exists()


@pytest.mark.parametrize("client", FILES)
def test_what_else_is_in_the_file_stays(connect, home, client):
    path = home / FILES[client]
    path.parent.mkdir(parents=True)
    path.write_text(OLD[client])
    path.chmod(0o640)
    before = load(path)
    status, said, _ = connect(client, "--write")
    assert status == 0
    assert ("Every Claude Code session" in said) == (client == "claude")
    assert ("default model" in said) == (client in ("opencode", "codex"))
    assert path.with_name(path.name + ".bak").read_text() == OLD[client]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    after, text = load(path), path.read_text()
    if client == "opencode":
        assert after["theme"] == "dark"
        assert after["provider"]["other"] == {"name": "o"}
        assert after["provider"]["mlx-mtp"]["x"] == 1
    elif client == "claude":
        assert after["env"]["FOO"] == "1"
        assert after["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "1024"
        assert after["permissions"] == before["permissions"]
    elif client == "codex":
        assert "# mine" in text
        assert after["model"] == MODEL
        assert after["model_providers"]["other"] == {"name": "o"}
        assert after["projects"] == before["projects"]
    else:
        assert "# mine" in text and "# best" in text
        assert (after["name"], after["rules"]) == ("Me", ["Be kind"])
        assert after["models"][0] == before["models"][0]
        assert [model["model"] for model in after["models"]] == ["llama", MODEL]
    undo(said)
    assert path.read_text() == OLD[client]
    # What can't be read is left as it is.
    for wrong in ("{ // a comment\n [", "[]" if path.suffix != ".toml" else "a = "):
        path.write_text(wrong)
        there = set(path.parent.iterdir())
        status, _, error = connect(client, "--write")
        assert status == 2
        assert str(path) in error
        assert path.read_text() == wrong
        assert set(path.parent.iterdir()) == there


def test_where_a_client_keeps_its_files(connect, home, monkeypatch):
    real, link = home / "dotfiles.json", home / FILES["claude"]
    real.write_text("{}")
    link.parent.mkdir()
    link.symlink_to(real)
    assert connect("claude", "--write")[0] == 0
    assert link.is_symlink()
    assert "env" in load(real)
    monkeypatch.setenv("CODEX_HOME", str(home / "elsewhere"))
    assert connect("codex", "--write")[0] == 0
    assert os.listdir(home / "elsewhere") == ["config.toml"]


@pytest.mark.parametrize("keys", [(), ("secret-kéy",)])
def test_claude_for_one_session_comes_first(serve, connect, home, monkeypatch, keys):
    """The variables are those of the file, and no file is touched."""
    monkeypatch.setenv("MLX_MTP_API_KEY", "secret-kéy")
    with serve(FakeEngine(answer([300])), api_keys=keys) as client:
        url = str(client.base_url)
        printed = connect("claude", url=url)[1]
        assert not any(home.iterdir())
        assert connect("claude", "--write", url=url)[0] == 0
    command = printed[printed.index("ANTHROPIC_BASE_URL") : printed.index("claude\n")]
    environ = {"PATH": os.environ["PATH"], "MLX_MTP_API_KEY": "secret-kéy"}
    shell = ["sh", "-c", f"{command} env"]
    found = subprocess.run(shell, env=environ, capture_output=True, text=True, check=True).stdout
    written = load(home / FILES["claude"])
    wanted = written["env"] | {"ANTHROPIC_AUTH_TOKEN": keys[0] if keys else "none"}
    assert {f"{name}={value}" for name, value in wanted.items()} <= set(found.splitlines())
    assert ("apiKeyHelper" in written) == bool(keys)


def test_keys_are_never_written(serve, connect, monkeypatch):
    with serve(FakeEngine(answer([300])), api_keys=("secret-key",)) as client:
        url = str(client.base_url)
        monkeypatch.delenv("MLX_MTP_API_KEY", raising=False)
        status, _, error = connect("codex", url=url)
        assert status == 2 and "requires its API key" in error
        status, _, error = connect("codex", "--api-key", "wrong", url=url)
        assert status == 2 and "refuses" in error
        monkeypatch.setenv("MLX_MTP_API_KEY", "secret-key")
        for name in (*FILES, "open-webui"):
            status, said, _ = connect(name, url=url)
            assert status == 0
            assert "secret-key" not in said
            assert said.count("MLX_MTP_API_KEY") >= 2


def test_open_webui(connect, home, url):
    assert f"OPENAI_API_BASE_URL={url}/v1" in connect("open-webui")[1]
    status, _, error = connect("open-webui", "--write")
    assert status == 2 and "leave out --write" in error
    assert not any(home.iterdir())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "No server answers"),
        ("127.0.0.1:1", "Connection refused"),
        ("x y", "No server answers"),
        ("ftp://x", "is not an address"),
        ("http://", "is not an address"),
    ],
)
def test_no_server(connect, url, words):
    status, _, error = connect("codex", url=url)
    assert status == 2
    assert error.startswith("mlx-mtp: ") and words in error
