"""Two ranks that serve the bundled model: how they end, and what they refuse."""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from mlx_mtp.ranks.links import LOST_SECONDS
from tests.conftest import DEMO
from tests.support.process import CHAT, MODEL, start_ranks

pytestmark = pytest.mark.full
SERVE = ["-m", "mlx_mtp", "serve", str(DEMO), "--served-model-name", MODEL, "--port", "0"]
SERVE += ["--calibration-seconds", "0.0"]


class Rank:
    """A process, and the lines it has written."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self.ready = threading.Event()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        with self.process.stdout as stdout:
            for line in stdout:
                self.lines.append(line)
                if address := re.search(r"address\s+(http://\S+)", line):
                    self.url = address[1]
                    self.ready.set()
        self.ready.set()

    def ended(self) -> tuple[int, str]:
        status = self.process.wait(120)
        self.reader.join()
        return status, "".join(self.lines)


@contextlib.contextmanager
def ranks(folder: Path, *commands: list[str]) -> Iterator[list[Rank]]:
    started = [Rank(process) for process in start_ranks(folder, commands)]
    try:
        yield started
    finally:
        for each in started:
            each.process.kill()
            each.reader.join()


def stream(url: str, max_tokens: int, began: Callable[[], object]) -> list[str]:
    """Returns all events of a streamed answer; `began` is called at the fifth."""
    fields = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    messages, events = [{"role": "user", "content": "Tell me a story."}], []
    body = {"model": MODEL, "messages": messages, **fields}
    with httpx.stream("POST", url + CHAT, json=body, timeout=120) as answer:
        for line in filter(None, answer.iter_lines()):
            events.append(line.removeprefix("data: "))
            if len(events) == 5:
                began()
    return events


@pytest.mark.parametrize(
    ("sig", "why"),
    [
        (signal.SIGKILL, "rank 1 has ended"),
        (signal.SIGSTOP, "rank 1 has not been heard of for 8 s"),
    ],
)
def test_a_lost_rank_ends_requests_and_rank_zero(tmp_path, sig, why):
    with ranks(tmp_path, SERVE, SERVE) as (lead, other):
        assert lead.ready.wait(120) and lead.url, lead.ended()
        events = stream(lead.url, 20_000, lambda: other.process.send_signal(sig))
        assert json.loads(events[-2])["error"]["message"] == f"Cut short: {why}."
        status, output = lead.ended()
        assert status == 1 and f"The ranks can't go on together: {why}." in output
        if sig == signal.SIGSTOP:
            other.process.send_signal(signal.SIGCONT)
            assert other.ended()[0] == 1


def test_ranks_that_are_stopped_together_go_on(tmp_path):
    """Ranks can be stopped, as by Ctrl-Z and `fg`, for longer than a rank can be silent."""
    with ranks(tmp_path, SERVE, SERVE) as (lead, other):
        assert lead.ready.wait(120) and lead.url, lead.ended()

        def pause() -> None:
            for sig, seconds in ((signal.SIGSTOP, LOST_SECONDS + 2), (signal.SIGCONT, 0)):
                for each in (lead, other):
                    each.process.send_signal(sig)
                time.sleep(seconds)

        assert stream(lead.url, 100, pause)[-1] == "[DONE]", (lead.lines, other.lines)
        lead.process.terminate()
        assert (lead.ended()[0], other.ended()[0]) == (0, 0), (lead.lines, other.lines)


def test_the_others_end_when_rank_zero_is_killed(tmp_path):
    with ranks(tmp_path, SERVE, SERVE) as (lead, other):
        assert lead.ready.wait(120) and lead.url, lead.ended()
        lead.process.kill()
        status, output = other.ended()
        assert status == 1 and "rank 0 has ended" in output


def test_a_port_that_is_taken_ends_all(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [port if each == "0" else each for each in SERVE]
        with ranks(tmp_path, command, command) as (lead, other):
            status, output = lead.ended()
            assert status == 2 and f"Port {port} on 127.0.0.1 is in use" in output
            status, output = other.ended()
            assert status == 2 and "Rank 0 and the others can't connect" in output


def faulty(code: str) -> list[str]:
    """Returns the command of a server that runs `code` first."""
    return [
        "-c",
        f"{code}\nimport sys\nfrom mlx_mtp.cli.main import main\nsys.exit(main())",
        *SERVE[2:],
    ]


def test_a_slow_rank_is_waited_for(tmp_path):
    """A rank whose steps take 50 ms longer causes no error or warning."""
    slow = faulty("""
import time
from mlx_mtp.engine.runner import ModelRunner
run = ModelRunner.run
def slowly(self, plan):
    time.sleep(0.05)
    return run(self, plan)
ModelRunner.run = slowly
""")
    with ranks(tmp_path, SERVE, slow) as (lead, other):
        assert lead.ready.wait(120) and lead.url, lead.ended()
        assert stream(lead.url, 100, lambda: None)[-1] == "[DONE]"
        assert httpx.get(f"{lead.url}/health").status_code == 200
        lead.process.terminate()
        assert (lead.ended()[0], other.ended()[0]) == (0, 0), (lead.lines, other.lines)
        assert not any("WARNING" in line or "can't" in line for line in lead.lines), lead.lines


@pytest.mark.parametrize("rank", [0, 1])
def test_full_memory_on_one_rank_ends_all(tmp_path, rank):
    """The error is that of Metal and CUDA; on a CPU mlx would crash, which also ends the rank."""
    full = faulty("""
from mlx_mtp.engine.runner import ModelRunner
decode, steps = ModelRunner._decode, []
def filled(self, plan):
    steps.append(plan)
    if len(steps) == 30:
        raise RuntimeError("[malloc] Unable to allocate 9 bytes.")
    return (yield from decode(self, plan))
ModelRunner._decode = filled
""")
    commands = [full if n == rank else SERVE for n in range(2)]
    with ranks(tmp_path, *commands) as (lead, other):
        assert lead.ready.wait(120) and lead.url, lead.ended()
        error = json.loads(stream(lead.url, 20_000, lambda: None)[-2])["error"]["message"]
        where = "a step failed on rank 0: " if rank == 0 else "rank 1 can't go on: a step failed: "
        assert where in error and "memory" in error, error
        assert (lead.ended()[0], other.ended()[0]) == (1, 1), (lead.lines, other.lines)


def test_prefixes_outlive_the_ranks(tmp_path):
    """SIGTERM ends all ranks after the running requests; a restart reuses their prefixes."""
    folder = tmp_path / "kept"
    command = [*SERVE, "--prefix-cache-dir", str(folder), "--mtp-draft-vocab", "500"]
    for cached in (False, True):
        with ranks(tmp_path, command, command) as (lead, other):
            assert lead.ready.wait(120) and lead.url, lead.ended()

            def stop() -> None:
                for each in (other, lead):
                    each.process.send_signal(signal.SIGTERM)

            *_, usage, done = stream(lead.url, 40, stop)
            reused = json.loads(usage)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert done == "[DONE]" and (reused > 0) == cached, usage
            assert (lead.ended()[0], other.ended()[0]) == (0, 0), (lead.lines, other.lines)
    assert sorted(each.name for each in folder.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]


def test_ranks_that_differ_do_not_start(tmp_path):
    weights = tmp_path / "other"
    shutil.copytree(DEMO, weights)
    file = next(weights.glob("model-00001*.safetensors"))
    tensors = mx.load(str(file))
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] * 1.01
    mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
    other = [str(weights) if each == str(DEMO) else each for each in SERVE]
    for command, what in (
        ([*SERVE, "--kv-cache-quantization", "8"], "--kv-cache-quantization: None and 8"),
        (other, "model: "),
    ):
        with ranks(tmp_path, SERVE, command) as both:
            for status, output in (each.ended() for each in both):
                assert status == 2 and f"Ranks 0 and 1 differ: {what}" in output, output


def test_what_does_not_work_with_ranks_is_refused(tmp_path):
    for command, count, what in (
        (["-m", "mlx_mtp", "generate", "Hi"], 2, "mlx.launch is for `mlx-mtp serve`"),
        (
            SERVE,
            3,
            "can't be cut for 3 ranks: layers.0.linear_attn.in_proj_qkvz.weight has 4 heads",
        ),
    ):
        with ranks(tmp_path, *[command] * count) as started:
            for status, output in (each.ended() for each in started):
                assert status == 2 and what in output, output
