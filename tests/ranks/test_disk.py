"""Each rank stores its part of a prefix on its own disk; a prefix is used only if all have it."""

import threading
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.models.loader import load_model
from mlx_mtp.prefix.directory import PrefixDirectory
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.ranks import segments
from mlx_mtp.ranks.segments import LeaderStore
from tests.conftest import DEMO
from tests.support.cases import EOS, ROOM, SAMPLED, STEP, ask, driver, words
from tests.support.exchange import led
from tests.support.harness import Driver, greedy, plain, request
from tests.support.prefixes import FINGERPRINT, flush
from tests.support.tiny_models import VOCAB, Layout, write_checkpoint

HISTORY = [*words(1, 20), EOS, *words(2, 30), EOS, 5]
FIRST = request("first", HISTORY, greedy(13, ignore_eos=True))


@pytest.fixture
def ranks(tmp_path):
    """A model, and its parts for two ranks."""
    write_checkpoint(tmp_path / "model", Layout("qwen3_next"))
    load = partial(load_model, tmp_path / "model", enable_mtp=True)
    return load(), [load(part=(rank, 2)) for rank in range(2)]


def serve(monkeypatch, folder: Path, models, *rounds, bits=None):
    """Start two ranks with a directory each, and run rounds of requests one after another."""
    with ExitStack() as stack:
        other = stack.enter_context(closing(PrefixStore(folder / "1", FINGERPRINT, 1 << 30)))

        def work(together) -> Driver:
            store = LeaderStore(together, folder / "0", FINGERPRINT, 1 << 30)
            config = EngineConfig(
                num_draft_tokens=2,
                prefill_step_size=STEP,
                prefix_cache_size=ROOM,
                kv_cache_quantization=bits,
            )
            segments = {"vocab_size": VOCAB, "stop_ids": (EOS,), "config": config}
            with closing(store):
                run = Driver(models[0], links=together, store=store, **segments)
                for each in rounds:
                    if callable(each):
                        each(run)
                        continue
                    for item in each:
                        run.add(item)
                    run.run()
                run.core.release()
                assert flush(store)
            return run

        run = led(monkeypatch, models, work, [other])
        assert flush(other)
    return run


def delete(file: Path) -> None:
    file.unlink()


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def files(folder: Path, *, snapshot: bool) -> list[Path]:
    """Returns the files of a rank, that of the longest prefix first."""
    ends = [(int(f.stem.rsplit("-", 1)[1]), f) for f in folder.glob("*.safetensors")]
    kind = [(end, f) for end, f in ends if (f.name.split("-")[4][-1] == "s") == snapshot]
    return [file for _, file in sorted(kind, reverse=True)]


ALL = [len(HISTORY) + 12, 32, len(HISTORY)]
LESS = [len(HISTORY), *ALL[1:]]
CASES = [
    pytest.param(None, 0, True, ALL, marks=pytest.mark.full),
    (delete, 1, True, LESS),
    pytest.param(truncate, 0, True, LESS, marks=pytest.mark.full),
    pytest.param(damage, 1, False, LESS, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("spoil", "rank", "snapshot", "reused"), CASES)
def test_after_a_restart_all_parts_are_there_or_none(
    tmp_path, monkeypatch, ranks, ties, spoil, rank, snapshot, reused
):
    """If a file of one rank is gone or broken, all ranks use a shorter prefix."""
    whole, models = ranks
    answer = plain(whole, FIRST, VOCAB).tokens
    serve(monkeypatch, tmp_path, models, [FIRST])
    if spoil is not None:
        spoil(files(tmp_path / str(rank), snapshot=snapshot)[0])
    again = [
        request("goes on", [*HISTORY, *answer, EOS, 9, 7], SAMPLED[0]),
        request("branch", [*HISTORY[:40], *words(4, 12)], greedy(9)),
        request("again", HISTORY, SAMPLED[1]),
    ]
    # The second start finds what the first one has computed and stored again.
    for expected in (reused, [len(again[0].prompt_token_ids), 52, len(HISTORY)]):
        run = serve(monkeypatch, tmp_path, models, *([each] for each in again))
        for each in again:
            reference = plain(whole, each, VOCAB, (EOS,))
            ties.check(each.request_id, run.tokens(each.request_id), reference)
        assert [run.reused(each.request_id) for each in again] == expected


def test_a_disk_that_hangs_on_one_rank_is_not_waited_for(tmp_path, monkeypatch, ranks, ties):
    """All ranks compute the prefix instead, and read it for a later request."""
    whole, models = ranks
    serve(monkeypatch, tmp_path, models, [FIRST])
    answers, read = threading.Event(), PrefixDirectory.read

    def late(directory: PrefixDirectory, file) -> bytes:
        assert directory.path.name == "0" or answers.wait(60)
        return read(directory, file)

    monkeypatch.setattr(PrefixDirectory, "read", late)
    monkeypatch.setattr(segments, "READ_SECONDS", 0.5)
    again = [request(f"{n}", HISTORY, SAMPLED[n]) for n in range(2)]

    def hanging(run: Driver) -> None:
        run.add(again[0])
        while not run.core.idle:
            run.step()
            time.sleep(0.01)
        run.prefixes.clear()
        monkeypatch.setattr(segments, "READ_SECONDS", 60.0)
        answers.set()

    run = serve(monkeypatch, tmp_path, models, hanging, again[1:])
    for each in again:
        ties.check(each.request_id, run.tokens(each.request_id), plain(whole, each, VOCAB, (EOS,)))
    assert [run.reused(each.request_id) for each in again] == [0, len(HISTORY)]


@pytest.mark.full
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_prefixes_are_those_of_one_machine(tmp_path, monkeypatch, demo_model, bits):
    prompt = [int(t) for t in np.random.default_rng(4).integers(2, VOCAB, 100)]
    first = request("first", prompt, greedy(20, ignore_eos=True))
    after = request("after", [*prompt, 7, 8], greedy(30, ignore_eos=True))
    models = [load_model(DEMO, enable_mtp=True, part=(rank, 2)) for rank in range(2)]
    runs = [[], []]
    for turn in range(4):  # Two starts of one machine, then two of two ranks.
        if turn < 2:
            with closing(PrefixStore(tmp_path / "one", FINGERPRINT, 1 << 30)) as store:
                run = driver(demo_model, store=store, kv_cache_quantization=bits)
                for each in (first, after):
                    ask(run, each)
        else:
            run = serve(monkeypatch, tmp_path, models, [first], [after], bits=bits)
        runs[turn // 2].append((run.tokens("first"), run.tokens("after"), run.reused("after")))
    assert runs[0] == runs[1] and runs[0][1][2] == len(prompt) + 2
