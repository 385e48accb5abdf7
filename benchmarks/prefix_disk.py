"""How long a running stream stalls while a large prefix is read from the disk.

An engine in this process with the bundled model in float32, and one stream that decodes all the
time. Beside it a long prompt is asked for one token: after a restart, when only the disk has its
prefix, and again with another last token, when memory has it. What counts is the stream's longest
pause between two tokens meanwhile.

    python -m benchmarks.prefix_disk [--tokens 120000] [--rounds 5]

The prompt is not computed: its KV is random numbers in the right shapes, 3 kB a token. The files
are put out of the page cache before each round where the system can do that (Linux), so that the
disk is really read.
"""

import argparse
import itertools
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mlx_mtp import backend

backend.prepare()

import mlx.core as mx

from mlx_mtp.bench.report import render
from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence as Row
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.prefix.cache import PrefixCache
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.prefix.policy import PrefixReuse
from mlx_mtp.prefix.radix_tree import root_key
from mlx_mtp.prefix.segments import Segment
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.draft_policy import FixedDrafts
from mlx_mtp.speculative.drafter import MTPDrafter

_CONFIG = EngineConfig(num_draft_tokens=1, prefix_cache_size=4 << 30)
_SHORT = 32
_PATIENCE = 600.0


class Listener:
    """Takes an engine's outputs, and notes when each token of a request came."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.times: dict[str, list[float]] = {}
        self.reused: dict[str, int] = {}
        self.leaving = False
        self._ended: set[str] = set()
        self._changed = threading.Condition()
        engine.start(self._deliver)

    def ask(self, name: str, prompt: Sequence[int], max_tokens: int) -> float:
        """Submit a request; returns when."""
        self.times[name], self.reused[name] = [], 0
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        self.engine.submit(Request(name, tuple(prompt), sampling))
        return began

    def wait(self, name: str, tokens: int | None = None) -> None:
        """Until a request has so many tokens, or has ended."""

        def there() -> bool:
            return name in self._ended if tokens is None else len(self.times[name]) >= tokens

        with self._changed:
            assert self._changed.wait_for(there, _PATIENCE), name

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        now = time.perf_counter()
        with self._changed:
            for output in outputs:
                assert output.error is None or self.leaving, output.error
                self.times[output.request_id] += [now] * len(output.token_ids)
                self.reused[output.request_id] += output.num_reused_tokens
                if output.finish_reason:
                    self._ended.add(output.request_id)
            self._changed.notify_all()


def open_store(folder: Path) -> PrefixStore:
    """The directory that all engines here use, one after another."""
    return PrefixStore(folder, "f" * 64, 16 << 30, max_queued_bytes=4 << 30)


def start(model: LoadedModel, folder: Path) -> Listener:
    """An engine on the directory."""
    store = open_store(folder)
    return Listener(build_engine(model, _CONFIG, model.vocab_size, (), store=store))


def write(model: LoadedModel, folder: Path, prompt: tuple[int, ...]) -> None:
    """Put a prompt's prefix on the disk: the states of its first tokens, and random KV."""
    store = open_store(folder)
    prefixes = PrefixCache(_CONFIG.prefix_cache_size, store=store)
    runner = ModelRunner(model, MTPDrafter(model), model.vocab_size, prefixes)
    reuse = PrefixReuse(prefixes.tree, (), _CONFIG.prefill_step_size)
    core = EngineCore(Scheduler(_CONFIG, FixedDrafts(1), reuse), runner, overlap=True)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    core.scheduler.add(Row(Request("first", prompt[:_SHORT], sampling), (), 1))
    while not core.idle:
        core.step()
    node = prefixes.tree.match(root_key(None), prompt)
    assert node is not None and isinstance(node.kv, Segment) and node.snapshot is not None
    more = len(prompt) - node.end
    arrays = {
        name: mx.random.normal((array.shape[0], more, array.shape[2])).astype(array.dtype)
        for name, array in node.kv.arrays.items()
    }
    entry = [
        Segment(node.end, len(prompt), arrays),
        Segment(len(prompt), len(prompt), node.snapshot.arrays),
    ]
    assert prefixes.tree.insert(root_key(None), prompt, entry)
    store.close(_PATIENCE)


def stall(times: Sequence[float], began: float, ended: float) -> float:
    """The longest pause between two tokens that overlaps a time."""
    return max(b - a for a, b in itertools.pairwise(times) if b > began and a < ended)


def measure(
    model: LoadedModel, folder: Path, prompt: tuple[int, ...], last: int
) -> list[tuple[float, float]]:
    """(stall, time to the first token) from the disk, and from memory.

    Args:
        model, folder: of the engine.
        prompt: whose prefix is on the disk.
        last: a token that has not been asked for behind it, nor the one after.
    """
    listener = start(model, folder)
    found = []
    try:
        listener.ask("stream", range(2, 2 + _SHORT), 1 << 15)
        # The first steps of every kind touch memory.
        listener.ask("short", range(100, 100 + _SHORT), 16)
        listener.wait("short")
        for number, name in enumerate(("disk", "memory")):
            listener.wait("stream", len(listener.times["stream"]) + 30)
            began = listener.ask(name, [*prompt, last + number], 1)
            listener.wait(name)
            assert listener.reused[name] == len(prompt), listener.reused
            first = listener.times[name][0]
            listener.wait("stream", len(listener.times["stream"]) + 5)
            found.append((stall(listener.times["stream"], began, first), first - began))
    finally:
        listener.leaving = True
        listener.engine.stop()
    return found


def put_out(folder: Path) -> bool:
    """Have the files read from the disk again."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return True


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = load_model(BUNDLED_MODEL, enable_mtp=True)
    # Random KV has no business with what the model was made for.
    model = replace(model, config={**model.config, "max_position_embeddings": 1 << 20})
    prompt = tuple(2 + i * 7919 % 4000 for i in range(options.tokens))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "prefixes"
        write(model, folder, prompt)
        size = sum(path.stat().st_size for path in folder.iterdir())
        rounds = []
        for number in range(options.rounds):
            cold = put_out(folder)
            rounds.append(measure(model, folder, prompt, 2 + 2 * number))
            print(" ".join(f"{stall:.3f} {first:.3f}" for stall, first in rounds[-1]), flush=True)
    print(f"{size / 1e6:.0f} MB on the disk, {'not ' if cold else ''}in the page cache")
    rows = []
    for name, found in zip(("disk", "memory"), zip(*rounds)):
        rows.append([name, *(f"{statistics.median(values):.3f}" for values in zip(*found))])
    print(render(["from (medians)", "longest pause s", "first token s"], rows))
    print(f"{platform.platform()}, {backend.prepare()}")


if __name__ == "__main__":
    main()
