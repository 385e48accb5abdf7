"""`mlx-mtp launch`: clients that use a server on this machine, for one session."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from mlx_mtp.connect.clients import Served
from mlx_mtp.connect.command import SESSION_NAMES
from mlx_mtp.connect.sessions import LAUNCHERS, SessionStart
from mlx_mtp.running import running_servers
from tests.clients.agents import FOLDER
from tests.clients.npm import environment, installed
from tests.conftest import DEMO
from tests.convert.test_provide import REPO, hub, published  # noqa: F401 - fixtures
from tests.support.fake_hub import FakeHub
from tests.support.waiting import wait_until

SERVED = Served("http://127.0.0.1:8000", "a/model", 40_000, True)
# Stands in for a client: records how it was started, asks the server, and exits with status 7.
CLIENT = f"""#!{sys.executable}
import json, os, sys, time, urllib.request
from pathlib import Path

home = Path(os.environ["HOME"])
url = os.environ["OPENAI_API_BASE"]
with urllib.request.urlopen(f"{{url}}/models") as response:
    models = [each["id"] for each in json.load(response)["data"]]
note = dict(url=url, key=os.environ["OPENAI_API_KEY"], arguments=sys.argv[1:], models=models)
(home / "note.new").write_text(json.dumps(note))
(home / "note.new").rename(home / "note.json")
while (home / "stay").exists():
    time.sleep(0.05)
sys.exit(7)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a fake aider on PATH; servers of other tests aren't visible from it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "aider").write_text(CLIENT)
    (programs / "aider").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


def launch(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mlx_mtp", "launch", *words]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def note_of(home: Path, process: subprocess.Popen[str]) -> dict[str, object]:
    """Returns what the client recorded, as soon as it is there."""
    while not (home / "note.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return json.loads((home / "note.json").read_text())


def test_a_server_is_started_and_ends_with_its_client(home: Path) -> None:
    (home / "stay").touch()
    process = launch("aider", str(DEMO), "--", "--message", "Hello -- you")
    note = note_of(home, process)
    (server,) = running_servers()
    assert note["url"] == f"{server.url}/v1"
    assert note["models"] == server.models
    assert note["arguments"][-2:] == ["--message", "Hello -- you"]
    assert not server.url.endswith(":8000")
    # Another session finds the server, and leaves it running.
    (home / "stay").unlink()
    (home / "note.json").unlink()
    process.send_signal(signal.SIGSTOP)
    second = launch("aider", server.models[0])
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 7, errors
    assert json.loads((home / "note.json").read_text())["url"] == note["url"]
    assert running_servers() == [server]
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 7, errors
    assert running_servers() == []
    assert not list((home / "XDG_STATE_HOME").rglob("*.log"))


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGHUP, signal.SIGKILL]
)
def test_a_closed_terminal_ends_client_and_server(home: Path, number: int) -> None:
    """If `launch` is killed, the server ends with the client."""
    (home / "stay").touch()
    process = launch("aider", str(DEMO))
    note_of(home, process)
    process.send_signal(number)
    if number == signal.SIGKILL:
        (home / "stay").unlink()
        process.communicate(timeout=60)
        wait_until(lambda: running_servers() == [])
        return
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert running_servers() == []


def test_a_terminal_that_is_closed_while_a_model_loads_leaves_no_server(home: Path) -> None:
    (home / "model").symlink_to(DEMO)
    process = launch("aider", str(home / "model"))
    assert process.stderr is not None
    while "Starting a server" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.5)  # the server's process has started, and is not ready yet
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGHUP
    assert subprocess.run(["pgrep", "-f", f"serve {home / 'model'}"]).returncode == 1


def test_errors_say_what_to_do(home: Path) -> None:
    missing = launch("codex")
    assert "npm install --global @openai/codex" in missing.communicate()[1]
    assert missing.returncode == 2
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text('{"model_type": "llama"}')
    broken = launch("aider", str(home / "model"))
    _, errors = broken.communicate(timeout=120)
    assert broken.returncode == 2
    assert "did not start" in errors and "llama" in errors
    assert not (home / "note.json").exists()


def test_each_client_is_told_address_model_key_and_context(tmp_path: Path) -> None:
    """They are in variables, flags or files; the key is in no flag, which every user could see."""
    assert set(SESSION_NAMES) == set(LAUNCHERS)
    for name, launcher in LAUNCHERS.items():
        folder = tmp_path / name
        folder.mkdir()
        session = launcher.session(SessionStart(SERVED, "the-key", folder))
        written = "".join(path.read_text() for path in folder.iterdir())
        told = json.dumps([*session.variables.values(), *session.arguments, written])
        assert SERVED.url in told and SERVED.model in told, name
        assert "the-key" in session.variables.values()
        assert not any("the-key" in word for word in session.arguments), name
        # Qwen Code and llm have no setting for the context length.
        assert ("40000" in told) == (name not in ("qwen", "llm")), name


def test_codex_reads_its_flags_as_toml(tmp_path: Path) -> None:
    words = LAUNCHERS["codex"].session(SessionStart(SERVED, "the-key", tmp_path)).arguments
    settings = tomllib.loads("\n".join(words[1::2]))
    assert settings["model"] == SERVED.model
    assert settings["model_providers"]["mlx-mtp"]["base_url"] == SERVED.openai_url


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_one_command_from_nothing_to_an_agent(
    hub: FakeHub,  # noqa: F811
    tmp_path: Path,
) -> None:
    """opencode runs on a model downloaded with its head; the second start sends no request."""
    config = json.loads(hub.files["config.json"])
    config.get("text_config", config)["max_position_embeddings"] = 1 << 16
    hub.files["config.json"] = json.dumps(config).encode()
    # The weights are random: with these ends an answer has about 50 tokens, and 2% have none.
    hub.files["generation_config.json"] = json.dumps(
        {"eos_token_id": [*range(0, 4096, 50)]}
    ).encode()
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
    variables |= {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "MLX_MTP_MEMORY_LIMIT": "64GB"}
    (tmp_path / "run").mkdir(mode=0o700)
    environ = environment(installed(FOLDER), tmp_path, **variables)
    words = ["opencode", "qwen3.6-35b", "--", "run", "What is the capital of France?"]
    command = [sys.executable, "-m", "mlx_mtp", "launch", *words]
    for start in range(2):
        hub.num_requests = 0
        pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(command, env=environ, cwd=tmp_path, timeout=600, **pipes)
        assert done.returncode == 0, done.stderr
        assert f"uses {REPO} at" in done.stderr and "0.00" not in done.stderr
        assert ("no MTP head: getting it" in done.stderr) == (not start)
        assert done.stdout.strip(), "the agent said nothing"
        assert (hub.num_requests == 0) == bool(start)
        assert not list(tmp_path.rglob("launch-*.log"))
    assert not list((tmp_path / "run").rglob("*.json"))
