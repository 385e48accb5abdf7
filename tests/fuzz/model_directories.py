"""Damaged model directories: each is served, or refused in one line; none hangs or crashes.

    python -m tests.fuzz.model_directories --seconds 3600 --seed 1

changes good directories at random and prints each fault with the case that shows it. A case runs in
a child of a process that has imported everything: `inspect`, `add-mtp-weights`, `convert`, and
`serve` with a completion.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mlx_mtp import backend

backend.prepare()

import fastapi  # noqa: F401
import httpx
import huggingface_hub  # noqa: F401
import mlx_lm.convert  # noqa: F401
import uvicorn  # noqa: F401

from mlx_mtp import cli, serving
from tests.fuzz.damage import CASES, SECRET, SERVED, Change, good_directory, random_cases
from tests.tiny_models import FAMILIES

PATIENCE = 60  # seconds for one case, on a busy machine


def _ask(text: str) -> None:
    """In the child, when the server is ready: a completion, /health, and the end."""
    port = re.search(r"http://127\.0\.0\.1:(\d+)", text)
    assert port

    def ask() -> None:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port[1]}", timeout=PATIENCE) as client:
                body = {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 1}
                codes = client.post("/v1/completions", json=body), client.get("/health")
                chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
                said = client.post("/v1/chat/completions", json=chat)
                statuses = " ".join(str(answer.status_code) for answer in (*codes, said))
                sys.stdout.write(f"\nANSWERED {statuses}\n{said.text[:300]}\n")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()


def _child(path: Path, like: Path, output: Path) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    serving._announce = _ask
    status = 99
    try:
        print("INSPECTED", cli.main(["inspect", str(path)], {}))
        for words in (
            ["add-mtp-weights", path, "--source-model", like, "--dry-run", "--force"],
            ["add-mtp-weights", like, "--source-model", path, "--dry-run", "--force"],
            ["convert", path, "--output", path.parent / "converted"],
        ):
            done = cli.main([str(word) for word in words], {})
            assert done in (0, 2), words
        flags = ["--port", "0", "--calibration-seconds", "0", "--mtp-num-draft-tokens", "1"]
        status = cli.main(["serve", str(path), *flags], {})
        print("SERVED", status)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def fault_of(path: Path, like: Path, wanted: str | None = None) -> str | None:
    """What is wrong with how a directory, made of `like`, is taken; None if nothing is."""
    output = path.parent / "output"
    pid = os.fork()
    if not pid:
        _child(path, like, output)
    deadline = time.monotonic() + PATIENCE
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"hangs: {output.read_text(errors='replace')[-2000:]}"
        time.sleep(0.01)
    status = os.waitstatus_to_exitcode(ended[1])
    said = output.read_text(errors="replace")
    why = re.search(r"^mlx-mtp: (.*)\nSERVED 2$", said, re.MULTILINE)
    refused, served = why is not None and status == 2, status == 0 and "SERVED 0" in said
    if "Traceback" in said or SECRET in said or not (refused or served):
        return f"status {status}: {said[-2000:]}"
    if served and not re.search(r"^ANSWERED (200|400) 200 (200|400)$", said, re.MULTILINE):
        return f"it is ready and does not answer: {said[-2000:]}"
    by_weights = refused and "can't answer" in said
    if refused and not by_weights and said.startswith("fits yes"):
        return f"inspect says that it fits, but `serve` refuses it: {said[:2000]}"
    if wanted == SERVED and not served:
        return f"not served: {said[-2000:]}"
    if wanted not in (None, SERVED) and not (why and wanted in why[1]):
        return f"it does not say {wanted!r}: {said[-1000:]}"
    return None


def run(
    cases: Iterator[tuple[str, str, Change, str | None]], until: float = float("inf")
) -> tuple[int, int]:
    """Run cases until a time (`monotonic`); prints the faults, returns how many there were."""
    count = faults = 0
    with tempfile.TemporaryDirectory(prefix="mlx-mtp-fuzz-") as folder:
        root = Path(folder)
        (root / "secret").write_text(SECRET)
        # In a child: after an evaluation of its own no process can fork others that evaluate.
        if not os.fork():
            for family in FAMILIES:
                good_directory(root / family, family)
            os._exit(0)
        assert os.wait()[1] == 0
        for family, name, change, wanted in cases:
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
                fault = fault_of(path, root / family, wanted)
            if fault is not None:
                faults += 1
                print(f"--- {family}, {name}: {fault}\n", flush=True)
            shutil.rmtree(path)
            shutil.rmtree(root / "converted", ignore_errors=True)
    return count, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0, help="of random changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="the cases of the table whose names have this")
    options = parser.parse_args()
    os.environ["MLX_MTP_CACHE_DIR"] = tempfile.mkdtemp(prefix="mlx-mtp-fuzz-cache-")
    if options.seconds:
        until = time.monotonic() + options.seconds
        count, faults = run(random_cases(options.seed), until)
    else:
        named = (
            ("qwen3_next", name, *case) for name, case in CASES.items() if options.only in name
        )
        count, faults = run(named)
    print(f"{count} directories, {faults} faults")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
