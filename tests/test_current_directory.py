"""No command runs a Python file of the current directory, which may be a model's."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import httpx
import pytest

from mlx_mtp.models.hub import BUNDLED_MODEL
from tests.support.process import CHAT
from tests.support.quick import full

# The installed program imports from its own folder first, `-m` from the current directory.
PROGRAM = (str(Path(sysconfig.get_path("scripts"), "mlx-mtp")),)
SAFELY = (sys.executable, "-P", "-m", "mlx_mtp")
MODULE = (sys.executable, "-m", "mlx_mtp")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model beside a Python file for each module that could be imported."""
    path = tmp_path_factory.mktemp("hostile")
    for file in BUNDLED_MODEL.iterdir():
        shutil.copy(file, path)
    names = {*sys.stdlib_module_names, *metadata.packages_distributions(), "torch", "usercustomize"}
    for name in filter(str.isidentifier, names - {"mlx_mtp", "__main__"}):
        (path / f"{name}.py").write_text(
            f"open({str(path / 'ran')!r}, 'a').write({name!r} + '\\n')"
        )
    return path


@contextlib.contextmanager
def with_our_name(path: Path) -> Iterator[None]:
    """Add a folder with this package's name, which `python -m mlx_mtp` would find first."""
    (path / "mlx_mtp").mkdir()
    (path / "mlx_mtp" / "__init__.py").write_text((path / "signal.py").read_text())
    yield
    shutil.rmtree(path / "mlx_mtp")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, hostile: Path) -> tuple[str, ...]:
    """The program as on a Mac, where libraries start Python processes for locks.

    Its path has a colon; `sys.path` has relative entries, which lead into the model's directory.
    """
    start = tmp_path_factory.mktemp("a:b") / "start.py"
    start.write_text(
        "import multiprocessing, sys; sys.path.append('relative')\n"
        "from mlx_mtp.__main__ import main\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('spawn')\n"
        "    sys.exit(main())\n"
    )
    for folder in {"relative", *(entry for entry in sys.path if not os.path.isabs(entry))} - {""}:
        (hostile / folder).mkdir()
        shutil.copy(hostile / "torch.py", hostile / folder)
    return sys.executable, str(start)


def environment() -> dict[str, str]:
    """Returns the environment without variables that change where Python imports from."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}


@pytest.mark.parametrize(
    "command",
    # In the quick run only the server's test starts the program, as a script.
    [full(PROGRAM), full(SAFELY), MODULE],
    ids=["mlx-mtp", "-P -m", "-m"],
)
def test_a_command_imports_nothing_from_the_current_directory(
    hostile: Path, command: tuple[str, ...]
) -> None:
    named = contextlib.nullcontext() if command is MODULE else with_our_name(hostile)
    with named:
        argv = [*command, "inspect", "."]
        done = subprocess.run(argv, cwd=hostile, env=environment(), capture_output=True, text=True)
    assert not (hostile / "ran").exists(), (hostile / "ran").read_text()
    assert done.returncode == 0, done.stderr


def test_a_server_and_its_processes_import_nothing_from_the_current_directory(
    hostile: Path, program: tuple[str, ...]
) -> None:
    """This includes the processes for templates, tokenizers and grammars."""
    argv = [*program, "serve", ".", "--port", "0", "--served-model-name", "m"]
    argv += ["--calibration-seconds", "0"]
    with (
        with_our_name(hostile),
        subprocess.Popen(
            argv, cwd=hostile, env=environment(), stdout=subprocess.PIPE, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            address = next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)))
            fields = {"model": "m", "max_tokens": 3, "guided_regex": "[a-z]{2}"}
            body = {**fields, "messages": [{"role": "user", "content": "hi"}]}
            answer = httpx.post(address[0] + CHAT, json=body, timeout=120)
        finally:
            server.terminate()
    assert not (hostile / "ran").exists(), (hostile / "ran").read_text()
    assert re.fullmatch("[a-z]{2}", answer.json()["choices"][0]["message"]["content"])


def test_pythons_own_directories_may_be_the_current_one() -> None:
    for current in {os.path.dirname(os.__file__), sysconfig.get_path("purelib")}:
        argv = [*PROGRAM, "--version"]
        done = subprocess.run(argv, cwd=current, env=environment(), capture_output=True, text=True)
        assert done.stdout.startswith("mlx-mtp "), done.stderr
