"""`mlx-mtp service`: files for systemd and launchd, what is written and removed, and a session."""

import contextlib
import os
import platform
import plistlib
import shlex
import shutil
import stat
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cli.main import main
from mlx_mtp.cli.service import _Job, _plist, _unit
from tests.support.process import free_ports
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
ODD = "a b%h\\ \"q\" 'x' $HOME ${HOME} é; \\"
words = st.text(st.sampled_from("ab %\\\"'$;é:{}#=-"), max_size=12)
odd = _Job(["/bin/true", ODD, "", ";", "%%"], {"MLX_MTP_API_KEY": ODD}, f"/tmp/{ODD}", 45)


def settings_of(unit: bytes) -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit.decode().splitlines() if "=" in line)


@given(st.lists(words, min_size=1), words, words)
@settings(max_examples=25)
def test_words_of_a_unit_are_those_of_the_job(arguments, value, folder):
    """Within double quotes systemd and shlex read backslashes alike."""
    unit = settings_of(_unit(_Job(["/bin/a b", *arguments], {"A": value}, f"/{folder}", 1)))

    def read(text):
        assert "%" not in text.replace("%%", "")
        return shlex.split(text.replace("%%", "%"))

    assert read(unit["ExecStart"]) == [":/bin/a b", *arguments]
    assert read(unit["Environment"]) == [f"A={value}"]
    assert unit["WorkingDirectory"].replace("%%", "%") == f"/{folder}/"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemds_own_checker_takes_the_unit(tmp_path):
    (tmp_path / "mlx-mtp.service").write_bytes(_unit(odd._replace(folder="/tmp")))
    argv = ["systemd-analyze", "--user", "verify", str(tmp_path / "mlx-mtp.service")]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_property_list(tmp_path):
    text = _plist(odd, "/log & <x>")
    assert plistlib.loads(text) == {
        "Label": "local.mlx-mtp",
        "ProgramArguments": odd.command,
        "WorkingDirectory": odd.folder,
        "EnvironmentVariables": {"MLX_MTP_LOG_FILE": "/log & <x>"} | odd.variables,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 45,
        "ProcessType": "Interactive",
        "StandardOutPath": "/log & <x>",
        "StandardErrorPath": "/log & <x>",
    }
    # plutil -lint requires this beside a text that can be parsed.
    root = ElementTree.fromstring(text)
    assert (root.tag, root.get("version"), [each.tag for each in root]) == (
        "plist",
        "1.0",
        ["dict"],
    )
    for each in root.iter("dict"):
        assert {child.tag for child in each[::2]} <= {"key"}
        assert {child.tag for child in each[1::2]} <= {"string", "integer", "array", "dict"} | {
            "true",
            "false",
        }
    if shutil.which("plutil"):
        (tmp_path / "a.plist").write_bytes(text)
        subprocess.run(["plutil", "-lint", str(tmp_path / "a.plist")], check=True)


@pytest.fixture(params=["Linux", "Darwin"])
def system(request, tmp_path, monkeypatch):
    """A home directory, and programs in place of the system's, which record how they are called."""
    monkeypatch.setattr(platform, "system", lambda: request.param)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", os.pathsep)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("systemctl", "launchctl", "journalctl", "tail"):
        program = tmp_path / "bin" / name
        # The job is not running; the session exists unless the file `closed` exists.
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n'
            f'case "$*" in *status*|*/local.mlx-mtp) exit 3;; esac\n'
            f"if [ -e {tmp_path}/closed ]; then echo no session >&2; exit 1; fi\n"
        )
        program.chmod(0o755)
    return request.param


FILES = {
    "Linux": ".config/systemd/user/mlx-mtp.service",
    "Darwin": "Library/LaunchAgents/local.mlx-mtp.plist",
}


def test_what_is_installed_replaced_and_removed(system, tmp_path, capfd):
    before, path = sorted(tmp_path.rglob("*")), tmp_path / FILES[system]
    variables = {"HF_HOME": "/models", "MLX_MTP_PORT": "9", "PATH": "/bin", "SECRET": "s"}

    def run(*words):
        (tmp_path / "calls").unlink(missing_ok=True)
        status = main(["service", *words], variables)
        calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
        return status, calls, "".join(capfd.readouterr())

    for words in (["status"], ["logs"], ["uninstall"]):
        assert run(*words)[::2] == (2, f"mlx-mtp: No service is installed: {path} is not there.\n")
    (tmp_path / "closed").touch()
    assert run("install")[0] == 2 and not path.exists()
    (tmp_path / "closed").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(variables, "HF_TOKEN", "secret\n")
        _, calls, shown = run("install")
        assert "control characters of 'HF_TOKEN'" in shown and "secret" not in shown and not calls
    for flags in (["--port", "x"], ["--no-enable-mtp", "--drafts", "mtp"], ["model\n"]):
        with contextlib.suppress(SystemExit):
            assert run("install", "--", *flags)[0] == 2
        assert not path.exists()
    for key in (["--api-key", "k%1"], ["--api-key=k%1"]):
        status, calls, shown = run("install", "--", "some/model", *key, "--port", "7")
        assert status == 0 and "k%1" not in shown and "some/model --port 7" in shown
        assert all(text in shown for text in (str(path), "HF_HOME, MLX_MTP_API_KEY"))
        assert calls.splitlines()[-1] in (
            "systemctl --user enable --now mlx-mtp.service",
            f"launchctl bootstrap gui/{os.getuid()} {path}",
        )
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        text = path.read_text()
        assert "SECRET" not in text and text.count("k%") == 1 and "--api-key" not in text
        job = plistlib.loads(text.encode()) if system == "Darwin" else settings_of(text.encode())
        assert str(job["WorkingDirectory"]).rstrip("/") == str(tmp_path)
        path.chmod(0o644)  # it is replaced, whatever its mode is
    for words in (["status"], ["logs", "-f"]):
        assert run(*words)[1].count("\n") == 1
    logs = [tmp_path / f"Library/Logs/mlx-mtp.log{end}" for end in ("", ".1", ".3")]
    if system == "Darwin":
        logs[0].parent.mkdir()
        for log in logs:
            log.touch()
    assert run("uninstall")[0] == 0
    assert [each for each in sorted(tmp_path.rglob("*")) if each.is_file()] == [
        each for each in [*before, tmp_path / "calls"] if each.is_file()
    ]
    path.write_text("somebody else's")
    assert run("install")[0] == run("uninstall")[0] == 2
    assert path.read_text() == "somebody else's"


def test_a_log_file_is_rotated_and_standard_error_follows(tmp_path):
    code = """
import logging, os, sys
from mlx_mtp import logs
logs.LogFile.__init__.__defaults__ = (300,)
logs.set_up("info", "text", sys.argv[1])
for number in range(40):
    logging.warning("record %d", number)
    print("error", number, file=sys.stderr)
"""
    path = tmp_path / "log"
    path.write_text("an old start\n" * 30)
    with path.open("a") as file:
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, stderr=file)
    names = ["log", "log.1", "log.2", "log.3"]
    assert sorted(each.name for each in tmp_path.iterdir()) == names
    texts = [(tmp_path / name).read_text() for name in names]
    assert all(len(text) < 400 and "record" in text and "error" in text for text in texts)
    assert texts[0].endswith("error 39\n")


def without_session() -> str | None:
    """Returns the reason why no second user manager can be started here, or None."""
    if shutil.which("systemd-analyze") is None:
        return "there is no systemd"
    if Path("/run/systemd/system").exists():
        return "a user's own session is left alone"
    enter = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    if shutil.which("unshare") is None or subprocess.run(enter, capture_output=True).returncode:
        return "a private user session takes root's rights"
    return None


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A user manager of systemd in its own namespaces, which is shut down at the end."""
    if reason := without_session():
        pytest.skip(reason)
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    # systemd requires a system that it has booted; as process 1 it would become that system.
    code = "mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && $0 --user; true"
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    manager = [*enter, "sh", "-c", code, "/usr/lib/systemd/systemd"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(manager, **quiet) as process:
        try:
            wait_until((runtime / "systemd/private").exists)
            inner = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().strip()
            inside = ["nsenter", "--target", inner, "--mount", "--pid", shutil.which("systemctl")]
            (tmp_path / "systemctl").write_text(f'#!/bin/sh\nexec {shlex.join(inside)} "$@"\n')
            (tmp_path / "systemctl").chmod(0o755)
            monkeypatch.setenv("PATH", str(tmp_path), os.pathsep)
            yield
        finally:
            process.kill()


@pytest.mark.full
def test_a_user_session_serves_restarts_and_forgets(session, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "a b%h \\'\\"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "keys").write_text("a key\n")
    (folder / "keys").chmod(0o600)
    (port,) = free_ports(1)
    flags = ["--port", str(port), "--api-key-file", "keys", "--served-model-name", ODD]
    variables = {"MLX_MTP_CALIBRATION_SECONDS": "0", "MLX_MTP_API_KEY": 'k%d "$HOME" \\'}

    def names(key):
        with contextlib.suppress(httpx.TransportError):
            headers = {b"Authorization": f"Bearer {key}".encode()}
            answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers).json()
            return [each["id"] for each in answer["data"]]

    for _ in range(2):  # the second one replaces the first
        assert main(["service", "install", "--", *flags], variables) == 0
        wait_until(lambda: names("a key") == names(variables["MLX_MTP_API_KEY"]) == [ODD])
    subprocess.run(["systemctl", "--user", "kill", "--signal=KILL", "mlx-mtp.service"], check=True)
    wait_until(lambda: names("a key") is None)
    wait_until(lambda: names("a key") == [ODD])
    assert main(["service", "status"]) == 0
    assert "active (running)" in capfd.readouterr().out
    assert main(["service", "uninstall"]) == 0
    assert names("a key") is None
    assert not [each for each in tmp_path.glob(".config/**/*") if not each.is_dir()]
