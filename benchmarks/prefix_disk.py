"""How long a running stream stalls while a large prefix is read from the disk."""

import tempfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from benchmarks import Row, Rows, row
from benchmarks.cores import listening, row_of
from benchmarks.timed import drop_cached, medians
from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.prefix.cache import PrefixCache
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.prefix.policy import PrefixReuse
from mlx_mtp.prefix.radix_tree import root_key
from mlx_mtp.prefix.segments import Segment
from mlx_mtp.speculative.draft_policy import FixedDrafts
from mlx_mtp.speculative.drafter import MTPDrafter

_CONFIG = EngineConfig(num_draft_tokens=1, prefix_cache_size=4 << 30)
_SHORT = 32
_PATIENCE = 600.0


def prefix_disk(tokens: int = 120_000, rounds: int = 5) -> Rows:
    """How long a running stream stalls while a large prefix is read from the disk.

    An engine in this process runs the bundled model in float32, with one stream that decodes all
    the time. A request with a long prompt then asks for one token: first after a restart, when only
    the disk has the prefix, and again with another last token, when memory has it. The result is
    the stream's longest pause between two tokens during the request.

    The prompt is not computed: its KV is random numbers of the right shapes, 3 kB per token. The
    files are dropped from the page cache before each round where the system can do that (Linux), so
    that they are really read from the disk.

    Args:
        tokens: tokens of the prompt
    """
    model = load_model(BUNDLED_MODEL, enable_mtp=True)
    # The prompt can exceed the model's context length, because its KV is random anyway.
    model = replace(model, config={**model.config, "max_position_embeddings": 1 << 20})
    prompt = tuple(2 + i * 7919 % 4000 for i in range(tokens))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "prefixes"
        _write(model, folder, prompt)
        size = sum(path.stat().st_size for path in folder.iterdir())
        rows = list[Row]()
        for number in range(rounds):
            is_cold = all(map(drop_cached, folder.glob("*.safetensors")))
            if not rows:
                yield f"{size / 1e6:.0f} MB on the disk, {'not ' * is_cold}in the page cache"
            rows += _measure(model, folder, prompt, 2 + 2 * number)
            yield from rows[-2:]
    yield "Medians:"
    yield from (medians(rows[::2]), medians(rows[1::2]))


def _measure(model: LoadedModel, folder: Path, prompt: tuple[int, ...], last: int) -> list[Row]:
    """Measure a hit from the disk and one from memory; `last` and `last + 1` must be new ends."""
    rows = list[Row]()
    store = _open_store(folder)
    with listening(build_engine(model, _CONFIG, model.vocab_size, (), store=store)) as listener:
        listener.ask("stream", range(2, 2 + _SHORT), 1 << 15)
        # A short request first, because the first step of every kind touches new memory.
        listener.ask("short", range(100, 100 + _SHORT), 16)
        listener.wait("short")
        for number, name in enumerate(("disk", "memory")):
            listener.wait("stream", len(listener.times["stream"]) + 30)
            began = listener.ask(name, [*prompt, last + number], 1)
            listener.wait(name)
            assert listener.num_reused[name] == len(prompt), listener.num_reused
            first = listener.times[name][0]
            listener.wait("stream", len(listener.times["stream"]) + 5)
            pause = max(listener.gaps("stream", began, first))
            names = "from | longest pause, s | first token, s"
            rows.append(row(names, name, pause, first - began))
    return rows


def _open_store(folder: Path) -> PrefixStore:
    return PrefixStore(folder, "f" * 64, 16 << 30, max_queued_bytes=4 << 30)


def _write(model: LoadedModel, folder: Path, prompt: tuple[int, ...]) -> None:
    """Write a prompt's prefix to the disk: the states of its first tokens, and random KV."""
    store = _open_store(folder)
    prefixes = PrefixCache(_CONFIG.prefix_cache_size, store=store)
    runner = ModelRunner(model, MTPDrafter(model), model.vocab_size, prefixes)
    reuse = PrefixReuse(prefixes.tree, (), _CONFIG.prefill_step_size)
    core = EngineCore(Scheduler(_CONFIG, FixedDrafts(1), reuse), runner, overlap=True)
    core.scheduler.add(row_of("first", prompt[:_SHORT], 1))
    while not core.idle:
        core.step()
    node = prefixes.tree.longest_prefix(root_key(None), prompt)
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
