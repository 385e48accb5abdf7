"""`mlx-mtp connect`: what is printed, what is written, and what is left as it was."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from mlx_mtp.cli import main
from tests.server.conftest import MODEL, Serve, Served
from tests.server.fake_engine import FakeEngine, answer

FILES = {
    "opencode": ".config/opencode/opencode.json",
    "claude": ".claude/settings.json",
    "codex": ".codex/config.toml",
    "continue": ".continue/config.yaml",
}


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Served]:
    with serve(FakeEngine(answer([300]))) as client:
        yield client


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "CONTINUE_GLOBAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def load(path: Path) -> Any:
    text = path.read_text()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if path.suffix == ".json" else YAML(typ="safe").load(text)


def url_in(config: Any) -> set[str]:
    """All addresses in a configuration."""
    if isinstance(config, dict):
        return set().union(*map(url_in, config.values()))
    if isinstance(config, list):
        return set().union(*map(url_in, config))
    return {config} if isinstance(config, str) and config.startswith("http://") else set()


@pytest.mark.parametrize("client", FILES)
def test_a_new_file(server: Served, home: Path, client: str) -> None:
    url = str(server.base_url).rstrip("/")
    assert main(["connect", client, "--url", f"{url}/v1/", "--write"]) == 0
    path = home / FILES[client]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    config = load(path)
    assert url_in(config) == {url if client == "claude" else f"{url}/v1"}
    assert MODEL in json.dumps(config)
    assert list(path.parent.iterdir()) == [path]
    # Once more: nothing changes, and what was there is kept.
    text = path.read_text()
    assert main(["connect", client, "--url", url, "--write"]) == 0
    assert load(path) == config
    assert path.with_name(path.name + ".bak").read_text() == text


@pytest.mark.parametrize("client", FILES)
def test_printed_it_is_what_would_be_written(
    server: Served, home: Path, client: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(server.base_url)
    assert main(["connect", client, "--url", url]) == 0
    printed = capsys.readouterr().out
    assert not any(home.iterdir())
    main(["connect", client, "--url", url, "--write"])
    path = home / FILES[client]
    before, _, body = printed.partition(f"# {path}\n")
    assert body.strip() == path.read_text().strip()
    assert bool(before) == (client == "claude")


def test_claude_for_one_session_comes_first(
    serve: Serve, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables are those of the file, and no file is touched."""
    for keys in ((), ("secret-key",)):
        with serve(FakeEngine(answer([300])), api_keys=keys) as client:
            monkeypatch.setenv("MLX_MTP_API_KEY", "secret-key")
            url = str(client.base_url)
            assert main(["connect", "claude", "--url", url]) == 0
            printed = capsys.readouterr().out
            assert not any(home.iterdir())
            command = printed[printed.index("ANTHROPIC_BASE_URL") : printed.index("claude\n")]
            environ = {"PATH": os.environ["PATH"], "MLX_MTP_API_KEY": "secret-key"}
            found = subprocess.run(
                ["sh", "-c", f"{command} env"],
                env=environ,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.splitlines()
            assert main(["connect", "claude", "--url", url, "--write"]) == 0
            written = load(home / FILES["claude"])
            wanted = written["env"] | {"ANTHROPIC_AUTH_TOKEN": keys[0] if keys else "none"}
            assert {f"{name}={value}" for name, value in wanted.items()} <= set(found)
            assert ("apiKeyHelper" in written) == bool(keys)
            capsys.readouterr()
            shutil.rmtree(home / ".claude")


@pytest.mark.parametrize("client", FILES)
def test_what_is_written_can_be_undone_as_it_says(
    server: Served, home: Path, client: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / FILES[client]
    for old in (None, OLD[client]):
        if old is not None:
            path.write_text(old)
        assert main(["connect", client, "--url", str(server.base_url), "--write"]) == 0
        said = capsys.readouterr().out
        if client == "claude":
            assert "Every Claude Code session" in said
        assert ("default model" in said) == (client in ("opencode", "codex"))
        undo = next(line for line in said.splitlines() if line.startswith("To undo this: "))
        subprocess.run(["sh", "-c", undo.removeprefix("To undo this: ")], check=True)
        assert (path.read_text() if path.exists() else None) == old


OLD = {
    "opencode": '{"theme": "dark", "provider": {"other": {"name": "o"}, "mlx-mtp": {"x": 1}}}',
    "claude": '{"env": {"FOO": "1"}, "permissions": {"allow": ["Bash"]}}',
    "codex": (
        '# mine\nmodel = "gpt-5" # best\n\n[model_providers.other]\nname = "o"\n\n'
        "[projects.'/x']\ntrust_level = \"trusted\"\n"
    ),
    "continue": (
        "# mine\nname: Me\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: other # best\n"
        "    provider: ollama\n    model: llama\nrules:\n  - Be kind\n"
    ),
}


@pytest.mark.parametrize("client", FILES)
def test_what_else_is_in_the_file_stays(server: Served, home: Path, client: str) -> None:
    path = home / FILES[client]
    path.parent.mkdir(parents=True)
    path.write_text(OLD[client])
    path.chmod(0o640)
    before = load(path)
    assert main(["connect", client, "--url", str(server.base_url), "--write"]) == 0
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
        assert "# mine" in text
        assert "# best" in text
        assert after["name"] == "Me"
        assert after["models"][0] == before["models"][0]
        assert len(after["models"]) == 2
        assert after["rules"] == ["Be kind"]
        main(["connect", client, "--url", str(server.base_url), "--write"])
        assert len(load(path)["models"]) == 2


@pytest.mark.parametrize("client", FILES)
def test_a_file_that_can_not_be_read_is_left_as_it_is(
    server: Served, home: Path, client: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / FILES[client]
    path.parent.mkdir(parents=True)
    for wrong in ("{ // a comment\n [", "[]" if path.suffix != ".toml" else "a = "):
        path.write_text(wrong)
        assert main(["connect", client, "--url", str(server.base_url), "--write"]) == 2
        assert str(path) in capsys.readouterr().err
        assert path.read_text() == wrong
        assert list(path.parent.iterdir()) == [path]


def test_a_link_stays_a_link(server: Served, home: Path) -> None:
    real = home / "dotfiles.json"
    real.write_text("{}")
    link = home / FILES["claude"]
    link.parent.mkdir()
    link.symlink_to(real)
    assert main(["connect", "claude", "--url", str(server.base_url), "--write"]) == 0
    assert link.is_symlink()
    assert "env" in load(real)


def test_keys_are_never_written(
    serve: Serve, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(FakeEngine(answer([300])), api_keys=("secret-key",)) as client:
        url = str(client.base_url)
        for name in (*FILES, "open-webui"):
            monkeypatch.delenv("MLX_MTP_API_KEY", raising=False)
            assert main(["connect", name, "--url", url]) == 2
            assert "API key" in capsys.readouterr().err
            assert main(["connect", name, "--url", url, "--api-key", "wrong"]) == 2
            assert "refuses" in capsys.readouterr().err
            monkeypatch.setenv("MLX_MTP_API_KEY", "secret-key")
            assert main(["connect", name, "--url", url]) == 0
            told = capsys.readouterr().out
            assert "secret-key" not in told
            assert told.count("MLX_MTP_API_KEY") >= 2


def test_open_webui(server: Served, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(server.base_url).rstrip("/")
    assert main(["connect", "open-webui", "--url", url]) == 0
    assert f"OPENAI_API_BASE_URL={url}/v1" in capsys.readouterr().out
    assert main(["connect", "open-webui", "--url", url, "--write"]) == 2
    assert not any(home.iterdir())


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "ftp://x", "http://", "x y"])
def test_no_server(home: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["connect", "codex", "--url", url]) == 2
    assert capsys.readouterr().err.startswith("mlx-mtp: ")


def test_where_a_client_keeps_its_files(
    server: Served, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODEX_HOME", str(home / "elsewhere"))
    assert main(["connect", "codex", "--url", str(server.base_url), "--write"]) == 0
    assert os.listdir(home / "elsewhere") == ["config.toml"]
