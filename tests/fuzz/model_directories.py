"""Damaged model directories: each is served, or refused in one line; none hangs or crashes.

    python -m tests.fuzz.model_directories --seconds 3600 --seed 1

changes good directories at random and prints each fault with its case, which `--seed 1 --case N`
repeats. Most cases run `inspect`, `add-mtp-weights`, `convert`, and `serve` with some requests, in
a child of a process that has imported everything. Some start commands in the directory
(`cd DIRECTORY && mlx-mtp serve .`), which then has hostile Python files too: none may be run.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path

from mlx_mtp import backend

backend.prepare()

import fastapi  # noqa: F401
import httpx
import huggingface_hub  # noqa: F401
import mlx_lm.convert  # noqa: F401
import uvicorn  # noqa: F401

from mlx_mtp.cli import main as cli
from mlx_mtp.cli import serve as serving
from tests.fuzz.damage import (
    CASES,
    SECRET,
    SERVED,
    Change,
    add_python_files,
    good_directory,
    random_cases,
)
from tests.support.tiny_models import FAMILIES

PATIENCE = 60  # seconds for one case, on a busy machine
COMMAND_PATIENCE = 240  # seconds for a case that starts two commands
SERVE = ["--port", "0", "--calibration-seconds", "0", "--mtp-num-draft-tokens", "1"]
# Ways to start the command in an untrusted directory. The last one would import a folder `mlx_mtp`
# there instead of the package, as Python searches that directory first.
STARTS = (
    [str(Path(sys.executable).with_name("mlx-mtp"))],
    [sys.executable, "-P", "-m", "mlx_mtp"],
    [sys.executable, "-m", "mlx_mtp"],
)
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
Case = tuple[str, str, Change, str | None]  # family, name, change, expected result


def _ask(address: str, *forms: dict[str, str]) -> None:
    """Print the statuses of a completion, /health and a chat of each form, and the last text."""
    with httpx.Client(base_url=address, timeout=PATIENCE) as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 1}
        answers = [client.post("/v1/completions", json=body), client.get("/health")]
        for form in forms:
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **form}
            answers.append(client.post("/v1/chat/completions", json=chat))
        statuses = " ".join(str(answer.status_code) for answer in answers)
        sys.stdout.write(f"\nANSWERED {statuses}\n{answers[-1].text[:300]}\n")


def _announce(text: str) -> None:
    """Announces the server in the child: sends the requests, then ends the server."""

    def ask() -> None:
        try:
            _ask(ADDRESS.findall(text)[0], {})
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()


def _run_commands(path: Path, start: list[str]) -> int:
    """Run `inspect` and `serve` as a user starts them there; returns the exit status of `serve`."""
    popen = partial(subprocess.Popen, cwd=path, stderr=subprocess.STDOUT, text=True)
    with popen([*start, "inspect", "."]) as process:
        pass
    print("INSPECTED", process.returncode)
    with popen([*start, "serve", ".", *SERVE], stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            print(line, end="")
            if address := ADDRESS.search(line):
                # The last form starts the process that checks grammars.
                _ask(address[0], {}, {"guided_regex": "a+"})
                process.terminate()
                print(process.stdout.read())
    print("SERVED", process.returncode)
    return process.returncode


def _run_here(path: Path, like: Path) -> int:
    """Run the commands in this process; returns the exit status of `serve`."""
    serving._announce = _announce
    print("INSPECTED", cli.main(["inspect", str(path)], {}))
    for words in (
        ["add-mtp-weights", path, "--source-model", like, "--dry-run", "--force"],
        ["add-mtp-weights", like, "--source-model", path, "--dry-run", "--force"],
        ["convert", path, "--output", path.parent / "converted"],
    ):
        done = cli.main([str(word) for word in words], {})
        assert done in (0, 2), words
    status = cli.main(["serve", str(path), *SERVE], {})
    print("SERVED", status)
    return status


def _child(path: Path, like: Path, output: Path, start: list[str] | None) -> None:
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    status = 99
    try:
        status = _run_commands(path, start) if start else _run_here(path, like)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def fault_of(
    path: Path, like: Path, wanted: str | None = None, start: list[str] | None = None
) -> str | None:
    """Returns the fault in how a directory made of `like` is treated, or None.

    `start` is the command that is started in the directory, in a process of its own.
    """
    output, marker = path.parent / "output", path.parent / "marker"
    if start:
        add_python_files(path, marker)
        if start == STARTS[-1]:
            shutil.rmtree(path / "mlx_mtp")
    pid = os.fork()
    if not pid:
        _child(path, like, output, start)
    deadline = time.monotonic() + (COMMAND_PATIENCE if start else PATIENCE)
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"hangs: {output.read_text(errors='replace')[-2000:]}"
        time.sleep(0.01)
    status = os.waitstatus_to_exitcode(ended[1])
    said = output.read_text(errors="replace")
    if marker.exists():
        ran = sorted({Path(line).name for line in marker.read_text().splitlines()})
        marker.unlink()
        return f"Python files of the directory are run, {', '.join(ran)}: {said[-2000:]}"
    why = re.search(r"^mlx-mtp: (.*)\nSERVED 2$", said, re.MULTILINE)
    refused, served = why is not None and status == 2, status == 0 and "SERVED 0" in said
    if "Traceback" in said or SECRET in said or not (refused or served):
        return f"status {status}: {said[-2000:]}"
    if served and not re.search(r"^ANSWERED (200|400) 200( (200|400))+$", said, re.MULTILINE):
        return f"it is ready and does not answer: {said[-2000:]}"
    by_weights = refused and "can't answer" in said
    if refused and not by_weights and said.startswith("fits yes"):
        return f"inspect says that it fits, but `serve` refuses it: {said[:2000]}"
    if wanted == SERVED and not served:
        return f"not served: {said[-2000:]}"
    if wanted not in (None, SERVED) and not (why and wanted in why[1]):
        return f"it does not say {wanted!r}: {said[-1000:]}"
    return None


def run(cases: Iterable[tuple[int, Case]], until: float = float("inf")) -> tuple[int, int]:
    """Run cases until the time `until` (`monotonic`), and print faults; returns cases and faults.

    Of every 16 cases, three start commands in the directory, one for each way in `STARTS`.
    """
    count = faults = 0
    with tempfile.TemporaryDirectory(prefix="mlx-mtp-fuzz-") as folder:
        root = Path(folder)
        (root / "secret").write_text(SECRET)
        # In a child process: once a process has evaluated arrays, its forks can't evaluate any.
        if not os.fork():
            for family in FAMILIES:
                good_directory(root / family, family)
            os._exit(0)
        assert os.wait()[1] == 0
        for number, (family, name, change, wanted) in cases:
            if time.monotonic() > until:
                break
            path = root / "model"
            shutil.copytree(root / family, path)
            try:
                change(path)
            except Exception:
                assert wanted is None, name
                fault = None  # An earlier change left nothing to change.
            else:
                count += 1
                start = dict(enumerate(STARTS)).get(number % 16)
                fault = fault_of(path, root / family, wanted, start)
            if fault is not None:
                faults += 1
                way = f"; {' '.join(start)}" if start else ""
                print(f"--- case {number}, {family}, {name}{way}: {fault}\n", flush=True)
            shutil.rmtree(path)
            shutil.rmtree(root / "converted", ignore_errors=True)
    return count, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0, help="of random changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one random case, by the number of a fault")
    parser.add_argument("--only", default="", help="the cases of the table whose names have this")
    options = parser.parse_args()
    os.environ["MLX_MTP_CACHE_DIR"] = tempfile.mkdtemp(prefix="mlx-mtp-fuzz-cache-")
    if options.seconds or options.case is not None:
        cases: Iterable[tuple[int, Case]] = enumerate(random_cases(options.seed))
        if options.case is not None:
            cases = islice(cases, options.case, options.case + 1)
    else:
        table = [("qwen3_next", name, *case) for name, case in CASES.items()]
        cases = (each for each in enumerate(table) if options.only in each[1][1])
    until = time.monotonic() + options.seconds if options.seconds else float("inf")
    count, faults = run(cases, until)
    print(f"seed {options.seed}: {count} directories, {faults} faults")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
