"""Output in terminals of 80 and 120 columns and in a pipe: banner, log, Ctrl-C."""

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mlx_mtp.console import columns, labelled
from tests.convert.test_provide import ORIGINAL, REPO, hub, published  # noqa: F401 - fixtures
from tests.support.fake_hub import COMMIT, FakeHub

COLUMNS = 80
_STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
# Text that differs from run to run, or from machine to machine.
_VARYING = {
    r"\d\d:\d\d:\d\d": "HH:MM:SS",
    r"(127\.0\.0\.1):\d+": r"\1:PORT",
    r"chatcmpl-[0-9a-f]{24}": "chatcmpl-ID",
    r"\d+\.\d s\b": "S s",
    r"\d+\.\d/s": "R/s",
    r"\d+% accepted": "P% accepted",
    r"\+(?!40 )\d+ tokens": "+N tokens",
    r"(?s)model    mlx-mtp-demo.*?\n\n": "(of this machine)\n\n",
}


def _own_terminal() -> None:
    """Make a typed Ctrl-C a signal, even if these tests run in a shell's background."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A process on a pseudo-terminal, or on a pipe if `columns` is None.

    `text` is the output without styles.
    """

    def __init__(self, *argv: str, columns: int | None = COLUMNS) -> None:
        self._own, other = os.pipe() if columns is None else pty.openpty()
        if columns is not None:
            termios.tcsetwinsize(other, (40, columns))
        # Only the settings below decide about width and color.
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
        environment |= {"TERM": "xterm-256color"}
        stdin = subprocess.DEVNULL if columns is None else other
        streams = {"stdin": stdin, "stdout": other, "stderr": other}
        self.process = subprocess.Popen(
            [sys.executable, *(argv if argv[0] == "-c" else ("-m", "mlx_mtp", *argv))],
            **streams,
            env=environment,
            start_new_session=True,
            preexec_fn=None if columns is None else _own_terminal,
        )
        os.close(other)
        self.raw = ""

    @property
    def text(self) -> str:
        return _STYLE.sub("", self.raw).replace("\r\n", "\n")

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + 120
        while (found := re.search(pattern, self.text)) is None:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._own], [], [], left)[0], self.text
            self._read()
        return found

    def type(self, text: str, pattern: str) -> str:
        """Clear the output, type text and wait for `pattern`; returns the output since then."""
        self.raw = ""
        os.write(self._own, text.encode())
        self.wait_for(pattern)
        return self.text

    def read_all(self) -> str:
        while self._read():
            pass
        self.process.wait(60)
        return self.text

    def _read(self) -> bool:
        try:
            data = os.read(self._own, 65536)
        except OSError:  # on Linux the other end is closed
            data = b""
        self.raw += data.decode(errors="replace")
        return bool(data)


@contextmanager
def terminal(*argv: str, columns: int | None = COLUMNS) -> Iterator[Terminal]:
    shown = Terminal(*argv, columns=columns)
    try:
        yield shown
    finally:
        shown.process.kill()
        shown.process.wait()
        os.close(shown._own)


RECORDING = """
  address  http://127.0.0.1:PORT
  (of this machine)

curl http://127.0.0.1:PORT/v1/chat/completions \\
  -H 'Content-Type: application/json' \\
  -H "Authorization: Bearer $MLX_MTP_API_KEY" \\
  -d '{"model": "mlx-mtp-demo",
       "messages": [{"role": "user", "content": "Tell me a story."}]}'

Ready. A browser finds a chat at the address. Ctrl-C stops the server.

HH:MM:SS /v1/chat/completions 200 S s, 13+40 tokens, R/s, P% accepted
HH:MM:SS Stopping: up to 30 s for 1 unfinished; Ctrl-C again ends it now.
HH:MM:SS Ending what is unfinished: 1.
HH:MM:SS WARNING /v1/chat/completions 200 S s, 13+N tokens, R/s, P% accepted, \
chatcmpl-ID: The server is shutting down.
HH:MM:SS Stopped.
"""


@pytest.mark.parametrize("num_rows", [1, 12])
def test_tables_and_labels_fit_and_keep_their_words(num_rows: int) -> None:
    header = [f"tokens a chunk {n}" for n in range(11)]
    rows = [["medium [b]", *(f"{n}23.4 ms" for n in range(10))]] * num_rows
    found = columns(header, rows, 1, COLUMNS)
    assert all(len(line) <= COLUMNS for line in found.split("\n"))
    assert found.count("[b]") == num_rows and all(f"{n}23.4" in found for n in range(10))
    assert all((f"{text} " in f"{found} ") == (num_rows == 1) for text in header)
    shown = labelled({"a": "word " * 40, "long label": "b\nc"}, COLUMNS)
    assert all(len(line) <= COLUMNS for line in shown.split("\n"))
    assert shown.count("word") == 40 and shown.endswith("\nlong label b\n           c")


@pytest.mark.parametrize("columns", [COLUMNS, 120, None])
def test_an_error_is_broken_between_words_in_a_terminal(columns: int | None) -> None:
    flags = ["serve", "--exact", "--kv-cache-quantization", "8"]
    with terminal(*flags, columns=columns) as shown:
        text = shown.read_all()
    lines = text.rstrip("\n").split("\n")
    assert len(lines) == {COLUMNS: 2, 120: 2, None: 1}[columns]
    assert max(map(len, lines)) <= (columns or 200)
    assert " ".join(lines) == (
        "mlx-mtp: --kv-cache-quantization lets tokens depend on what runs beside a request or is "
        "cached, and --exact does not: leave one of them out."
    )


OTHERS = [pytest.param(columns, marks=pytest.mark.full) for columns in (120, None)]


@pytest.mark.parametrize("columns", [COLUMNS, *OTHERS])
def test_serve_in_a_terminal_or_a_pipe(columns: int | None) -> None:
    """The command in the server's banner works."""
    flags = ("--port", "0", "--enable-mtp", "--calibration-seconds", "0", "--dtype", "float32")
    flags += ("--api-key", "k", "--mtp-num-draft-tokens", "2")
    with terminal("serve", *flags, columns=columns) as shown:
        command = shown.wait_for(r"(?s)curl (.*)\n\nReady\. .* Ctrl-C stops the server\.\n")[1]
        url, *options = shlex.split(command.replace("\\\n", " "))
        *headers, body = options[1::2]
        sent = dict(each.replace("$MLX_MTP_API_KEY", "k").split(": ") for each in headers)
        body = {**json.loads(body), "max_tokens": 40, "temperature": 0}
        answered = httpx.post(url, json=body, headers=sent, timeout=60).json()
        assert answered["choices"][0]["message"]["content"]
        assert answered["timings"]["draft_n_accepted"] > 0
        shown.wait_for("40 tokens, ")
        long = {**body, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url, json=long, headers=sent, timeout=60) as answer:
            lines = answer.iter_lines()
            for _ in range(16):  # until drafts have been accepted, on a busy machine too
                next(lines)
            shown.process.send_signal(signal.SIGINT)
            shown.wait_for("Ctrl-C again ends it")
            shown.process.send_signal(signal.SIGINT)
            assert "shutting down" in "".join(lines)
        text = shown.read_all()
        assert shown.process.returncode == 0
    # A progress bar appears if loading takes longer than 0.5 s, as on a busy machine.
    text = re.sub(r"(\r?Loading the weights: [^\r\n]*)+\r?\n", "", text)
    if columns is None:
        # In a pipe a line has a date, and always its level.
        text = re.sub(r"(?m)^\d{4}-\d\d-\d\d ([\d:]{8}) (?:INFO )?", r"\1 ", text)
    else:
        assert [line for line in text.split("\n") if len(line) > columns] == []
    # Where a line is wrapped depends on the numbers in it.
    text = re.sub(r"\n {9,}(?=\S)", " ", text)
    for pattern, word in _VARYING.items():
        text = re.sub(pattern, word, text)
    assert text == RECORDING


DOWNLOAD = f"""\
Downloading {REPO}, SIZE, to PLACE
{REPO} has no MTP head: getting it from {ORIGINAL}, of which SIZE are downloaded \
(--no-enable-mtp leaves it out).
{REPO} is in PLACE/snapshots/{COMMIT}, with an MTP head.
Next: mlx-mtp serve {REPO}
"""
_BAR = re.compile(
    r"Downloading: +(\d+)%\|[^|]*\| [\d.]+k?M?/[\d.]+[kM] \[[\d:]+<([\d:]+), +[\d.]+[kM]B/s\]"
)


@pytest.mark.parametrize("columns", [COLUMNS, *OTHERS])
def test_a_download_in_a_terminal_or_a_pipe(
    columns: int | None,
    hub: FakeHub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A download shows its size and place, and no progress bar stays empty or unfinished."""

    def slowly(name: str, content: bytes) -> Iterator[bytes]:
        if name.endswith(".safetensors"):
            yield content[: 3 << 20]
            time.sleep(1)
            content = content[3 << 20 :]
        yield content

    hub.pieces = slowly
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with terminal("pull", REPO, columns=columns) as shown:
        text = shown.read_all()
    frames = [
        part for line in text.split("\n") if "Downloading:" in line for part in line.split("\r")
    ]
    bars = [_BAR.fullmatch(frame) for frame in frames if frame]
    assert all(bars) and bool(bars) == (columns is not None), frames
    assert all(len(line) <= (columns or 1000) for line in frames)
    told = [line for line in text.split("\n") if "Downloading:" not in line]
    place = str(tmp_path / f"hub/models--{REPO.replace('/', '--')}")
    whole = " ".join(told).replace(place, "PLACE")
    assert re.sub(r"[\d.]+ [kM]B", "SIZE", whole).split() == DOWNLOAD.split()
    assert all(len(line) <= (columns or 1000) for line in told if place not in line)
    ends = [bar[1] for line in text.split("\n") if (bar := _BAR.search(line.split("\r")[-1]))]
    assert ends == ["100"] * len(ends)
