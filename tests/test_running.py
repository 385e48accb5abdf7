"""The files by which `mlx-mtp ps` finds servers: private, and not trusted when stale."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mtp.cli import main as cli
from mlx_mtp.running import RunningServer, announced, running_servers
from tests.support.process import Server

SERVER = RunningServer(
    pid=1,
    url="http://127.0.0.1:8000",
    models=["org/name"],
    directories=["/models/name"],
    needs_key=True,
    max_model_len=4096,
    weights=20_400_000_000,
    memory_limit=51_500_000_000,
    started=1_700_000_000.0,
)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    return tmp_path / "mlx-mtp"


def test_a_server_is_found_while_it_runs(folder, capsys):
    assert running_servers() == []
    with announced(SERVER):
        (path,) = folder.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert running_servers() == [SERVER]
        assert cli.main(["ps"], {}) == 0
        shown = capsys.readouterr().out
        for word in (SERVER.url, *SERVER.models, "20.4 GB of 51.5 GB"):
            assert word in shown
    assert running_servers() == [] == list(folder.iterdir())
    several = RunningServer(1, SERVER.url, ["org/a", "org/b", "a"], ["/a", "/b"], False, 1.0)
    with announced(several):
        assert running_servers() == [several]
        assert cli.main(["ps"], {}) == 0
        assert "org/a, org/b" in capsys.readouterr().out


def test_a_killed_servers_file_is_removed(folder):
    code = (
        "import os, signal; from tests.test_running import SERVER; "
        "from mlx_mtp.running import announced, running_servers\n"
        "with announced(SERVER):\n"
        "    assert running_servers() == [SERVER]\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    (path,) = folder.iterdir()
    assert running_servers() == [] and not path.exists()


def test_files_of_others_and_wrong_ones_are_ignored(folder, monkeypatch, caplog):
    with announced(SERVER):
        (path,) = folder.iterdir()
        for change in (
            lambda: path.chmod(0o644),
            lambda: folder.chmod(0o755),
            lambda: monkeypatch.setattr(os, "getuid", lambda: 12345),
        ):
            change()
            assert running_servers() == []
            path.chmod(0o600)
            folder.chmod(0o700)
        with announced(SERVER):  # as the other user
            assert "`mlx-mtp ps` will not show this server" in caplog.text
        monkeypatch.undo()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder.parent))
    for text in ("", "[]", "{}", json.dumps({"pid": 1}), "\xff"):
        with announced(SERVER):
            path.write_text(text, encoding="latin-1")
            assert running_servers() == []
    os.mkfifo(folder / "pipe.json", 0o600)
    (folder / "link.json").symlink_to("/etc/passwd")
    assert running_servers() == []


def test_a_real_server(mtp_server: Server):
    (found,) = (each for each in running_servers() if each.url == mtp_server.url)
    assert found.pid == mtp_server.process.pid and not found.needs_key
    assert 10**6 < found.weights < found.memory_limit
    (listed,) = mtp_server.http.get("/api/tags").json()["models"]
    files = Path(*found.directories).glob("*.safetensors")
    assert listed["size"] == sum(each.stat().st_size for each in files)
    (loaded,) = mtp_server.http.get("/api/ps").json()["models"]
    assert loaded["size"] == found.weights
