"""The command `mlx-mtp service`: runs `serve` from login on, as a job of launchd or systemd."""

import argparse
import os
import platform
import plistlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_mtp.console import labelled, say, say_wrapped, width_of
from mlx_mtp.errors import ServiceError, UsageError
from mlx_mtp.flags import CommandParser
from mlx_mtp.options import SERVE_FLAGS, check_serve
from mlx_mtp.settings import add_settings, resolve

_LABEL = "local.mlx-mtp"
_UNIT = "mlx-mtp.service"
_MODULE = "mlx_mtp"
_LOG_LINES = "100"
_RESTART_SECONDS = 10
_STOP_SECONDS = 15  # in addition to --drain-timeout
# Prefixes of the variables that `serve` reads: a job starts without the shell's variables.
_KEPT = (
    *("CUDA_", "HF_", "MLX_", "SSL_CERT_", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
)


class _Job(NamedTuple):
    command: Sequence[str]
    variables: Mapping[str, str]
    folder: str
    stop_seconds: int


class _Manager(NamedTuple):
    """The file and format of a job of launchd or systemd, and the commands that control the job."""

    path: Path
    render: Callable[[_Job], bytes]
    answers: list[str]  # a command that fails if the user has no session
    start: list[list[str]]
    stop: list[str]
    forget: list[list[str]]  # commands to run after the file is removed
    status: list[str]  # a command that fails unless the job runs
    logs: list[str]
    follow: str
    note: str  # a sentence on when the job runs
    log: Path | None = None


def add_service(commands: Any) -> None:
    """Register `service`."""
    parser = commands.add_parser("service", help="keep a server running, from login on")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    install = actions.add_parser(
        "install",
        usage="mlx-mtp service install [-- [MODEL] [FLAGS]]",
        help="install and start it, or replace it",
    )
    install.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        metavar="-- [MODEL] [FLAGS]",
        help="as for `mlx-mtp serve`; variables such as MLX_MTP_PORT are kept too",
    )
    actions.add_parser("status", help="show whether it runs")
    logs = actions.add_parser("logs", help="show the end of its log")
    logs.add_argument("-f", "--follow", action="store_true", help="and what is added to it")
    actions.add_parser("uninstall", help="stop it and remove what install wrote")
    parser.set_defaults(run=_service, environ=None)


def _service(given: argparse.Namespace) -> int:
    if given.action == "install":
        job = _job(given.flags[given.flags[:1] == ["--"] :], given.environ)
        return _install(_manager(), job)
    manager = _manager()
    if not manager.path.exists():
        raise ServiceError(f"No service is installed: {manager.path} is not there.")
    if given.action == "uninstall":
        return _uninstall(manager)
    command = manager.status if given.action == "status" else manager.logs
    if given.action == "logs" and given.follow:
        command = [*command, manager.follow]
    return subprocess.run(command).returncode


def _manager() -> _Manager:
    if platform.system() == "Darwin":
        domain = f"gui/{os.getuid()}"
        path = Path.home() / "Library/LaunchAgents" / f"{_LABEL}.plist"
        log = Path.home() / "Library/Logs/mlx-mtp.log"  # in a folder that only the user can read
        return _Manager(
            path,
            lambda job: _plist(job, str(log)),
            answers=["launchctl", "print", domain],
            start=[["launchctl", "bootstrap", domain, str(path)]],
            stop=["launchctl", "bootout", f"{domain}/{_LABEL}"],
            forget=[],
            status=["launchctl", "print", f"{domain}/{_LABEL}"],
            logs=["tail", "-n", _LOG_LINES, str(log)],
            follow="-F",
            note="It runs while you are logged in.",
            log=log,
        )
    if shutil.which("systemctl") is None:
        raise ServiceError(
            "This machine has neither launchd nor systemd: let its own service manager run "
            "`mlx-mtp serve`."
        )
    systemctl = ["systemctl", "--user"]
    return _Manager(
        Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "systemd/user", _UNIT),
        _unit,
        answers=[*systemctl, "show-environment"],
        start=[[*systemctl, "daemon-reload"], [*systemctl, "enable", "--now", _UNIT]],
        stop=[*systemctl, "disable", "--now", _UNIT],
        forget=[[*systemctl, "daemon-reload"]],
        status=[*systemctl, "status", "--no-pager", _UNIT],
        logs=["journalctl", "--user", "--no-pager", "-u", _UNIT, "-n", _LOG_LINES],
        follow="-f",
        note="It runs while you are logged in; `loginctl enable-linger` lets it run always.",
    )


def _install(manager: _Manager, job: _Job) -> int:
    _check(manager)
    rows = {
        "writes": f"{manager.path}, which only you can read",
        "command": shlex.join(job.command),
        "folder": job.folder,
        "variables": ", ".join(sorted(job.variables)) or "none",
        "log": str(manager.log or "the journal"),
        "runs": "\n".join(map(shlex.join, manager.start)),
    }
    say(labelled(rows, width_of(), "  "))
    if manager.path.exists():
        say_wrapped(
            f"The service that is there is stopped and replaced: {shlex.join(manager.stop)}"
        )
        _stop(manager)
    try:
        manager.path.parent.mkdir(parents=True, exist_ok=True)
        # Only the owner can read mkstemp's files: the job can contain an API key.
        descriptor, new = tempfile.mkstemp(dir=manager.path.parent, prefix=".mlx-mtp")
        with open(descriptor, "wb") as file:
            file.write(manager.render(job))
        os.replace(new, manager.path)
    except OSError as error:
        raise ServiceError(f"{manager.path} can't be written: {error.strerror}.") from None
    for command in manager.start:
        _run(command)
    say_wrapped(f"Started; `mlx-mtp service logs -f` shows when it is ready. {manager.note}")
    return 0


def _uninstall(manager: _Manager) -> int:
    _check(manager)
    _stop(manager)
    logs = [f"{manager.log}{end}" for end in ("", ".1", ".2", ".3")] if manager.log else []
    for path in (manager.path, *map(Path, logs)):
        if path.exists():
            path.unlink()
            say_wrapped(f"Removed {path}")
    for command in manager.forget:
        _run(command)
    return 0


def _job(flags: Sequence[str], environ: Mapping[str, str]) -> _Job:
    """Returns the job that runs `serve` with these flags; UsageError if `serve` refuses them."""
    parser = CommandParser(prog="mlx-mtp serve")
    parser.set_defaults(command="serve")
    add_settings(parser, *SERVE_FLAGS)
    options = resolve(parser.parse_args(flags), SERVE_FLAGS, environ)
    check_serve(options)
    variables = {name: text for name, text in environ.items() if name.upper().startswith(_KEPT)}
    words = list(flags)
    # Only the user can see a job's variables, but everyone can see its command line.
    for number, word in enumerate(flags):
        if word == "--api-key" or word.startswith("--api-key="):
            del words[number : number + (2 if word == "--api-key" else 1)]
            variables["MLX_MTP_API_KEY"] = options.api_key
    # -P: the working directory can contain a directory with the package's name.
    command = [sys.executable, "-P", "-m", _MODULE, "serve", *words]
    folder = os.getcwd()
    # The error names a variable, not its value, which can be a secret.
    for name, text in {**{each: each for each in (*command, folder)}, **variables}.items():
        if not text.isprintable():
            raise UsageError(f"A service can't hold the control characters of {name!r}.")
    return _Job(command, variables, folder, int(options.drain_timeout) + _STOP_SECONDS)


def _unit(job: _Job) -> bytes:
    """Returns a unit of systemd."""

    def quoted(text: str) -> str:
        text = text.replace("\\", r"\\").replace('"', r"\"").replace("%", "%%")
        return f'"{text}"'

    # The colon keeps systemd from replacing variables in the command.
    command = " ".join(map(quoted, (f":{job.command[0]}", *job.command[1:])))
    lines = [
        "[Unit]",
        "Description=mlx-mtp, a model server",
        "[Service]",
        "Type=exec",
        f"ExecStart={command}",
        # Not quoted; the last slash protects a backslash or spaces at the path's end.
        f"WorkingDirectory={job.folder.replace('%', '%%')}/",
        *(f"Environment={quoted(f'{name}={text}')}" for name, text in job.variables.items()),
        "Restart=on-failure",
        f"RestartSec={_RESTART_SECONDS}",
        f"TimeoutStopSec={job.stop_seconds}",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join((*lines, "")).encode()


def _plist(job: _Job, log: str) -> bytes:
    """Returns an agent of launchd."""
    return plistlib.dumps(
        {
            "Label": _LABEL,
            "ProgramArguments": list(job.command),
            "WorkingDirectory": job.folder,
            # The server rotates this file; launchd alone would let it grow without limit.
            "EnvironmentVariables": {"MLX_MTP_LOG_FILE": log, **job.variables},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_SECONDS,
            "ExitTimeOut": job.stop_seconds,
            # Other types of processes get less processor time and disk bandwidth.
            "ProcessType": "Interactive",
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
    )


def _check(manager: _Manager) -> None:
    """Raise ServiceError if the user has no session, or if another program wrote the file."""
    _run(manager.answers)
    if manager.path.exists() and _MODULE.encode() not in manager.path.read_bytes():
        raise ServiceError(
            f"{manager.path} was not written by `mlx-mtp service`: move it away first."
        )


def _stop(manager: _Manager) -> None:
    subprocess.run(manager.stop, capture_output=True)  # fails if the job is not loaded
    # launchctl returns before running requests are finished.
    for _ in range(600):
        if subprocess.run(manager.status, capture_output=True).returncode:
            return
        time.sleep(0.5)
    raise ServiceError("The service doesn't stop; see `mlx-mtp service status`.")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        reason = done.stderr.strip() or f"status {done.returncode}"
        raise ServiceError(f"`{shlex.join(command)}` failed: {reason}")
