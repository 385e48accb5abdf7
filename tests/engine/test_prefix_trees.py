"""Random trees of conversations through the prefix cache: every answer is plain decoding's."""

from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.request import Request, RequestOptions
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.sampling.params import SamplingParams
from tests.cache.prefixes import FINGERPRINT, flush
from tests.engine.cases import EOS, SAMPLED, RandomChunks, driver
from tests.harness import Driver, Plain, Ties, greedy, plain
from tests.tiny_models import FAMILIES, VOCAB

LONGEST = 150
TURNS = st.lists(
    st.fixed_dictionaries(
        {
            # Which earlier conversation it goes on from, by number (0 is an empty one), and how
            # much of that one's text it keeps; None: all, the answer too.
            "parent": st.integers(0, 6),
            "kept": st.one_of(st.none(), st.none(), st.floats(0.0, 1.0)),
            # Tokens that it adds, and of which text; some are the same.
            "message": st.integers(0, 40),
            "text": st.integers(0, 2),
            "sampling": st.integers(0, 9),  # 5 and above: greedy
            "salt": st.sampled_from(["", "", "", "other"]),
            # Steps of the engine before the next one comes, and what happens then.
            "steps": st.integers(0, 12),
            "then": st.sampled_from(["", "", "", "", "", "cancel", "clear"]),
        }
    ),
    min_size=2,
    max_size=8,
)
SHAPES = st.fixed_dictionaries(
    {
        "depth": st.sampled_from([0, 1, 2, 3, 5, "auto"]),
        "prefill_step_size": st.sampled_from([8, 16, 64]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "overlap": st.booleans(),
        "prefills": st.sampled_from([PrefillScheduler, RandomChunks]),
        "prefix_cache_size": st.sampled_from([60_000, 200_000, 1 << 26]),
    }
)


def text(number: int, count: int) -> list[int]:
    """The beginning of one of a few texts; some of its tokens end a message."""
    return [int(t) for t in np.random.default_rng(number).integers(1, 40, count)]


def play(
    model, turns: list[dict], shape: dict, ties: Ties, store: PrefixStore | None, reference
) -> Driver:
    """Ask the turns as they come, and hold every answer against plain decoding's."""
    warm = driver(model, store=store, **shape)
    asked: list[Request] = []
    left: set[str] = set()
    for number, turn in enumerate(turns):
        history: list[int] = []
        if parent := turn["parent"] % (number + 1):
            before = asked[parent - 1]
            # Its answer may still be coming.
            history = [*before.prompt_token_ids, *warm.tokens(before.request_id)]
        if turn["kept"] is not None:
            history = history[: int(turn["kept"] * len(history))]
        prompt = [*history, *text(turn["text"], turn["message"])][:LONGEST] or [5]
        kind = turn["sampling"]
        sampling = SAMPLED[kind] if kind < 5 else greedy(4 + kind)
        wanted = Request(
            f"turn {number}",
            tuple(prompt),
            sampling,
            options=RequestOptions(cache_salt=turn["salt"]),
        )
        asked.append(wanted)
        warm.add(wanted)
        for _ in range(turn["steps"]):
            warm.step()
        if turn["then"] == "cancel":
            warm.core.scheduler.cancel(wanted.request_id)
            left.add(wanted.request_id)
        elif turn["then"] == "clear":
            warm.prefixes.clear()
        assert warm.prefixes.tree.nbytes <= warm.prefixes.tree.limit
    warm.run()
    for wanted in asked:
        got = warm.tokens(wanted.request_id)
        told = reference(wanted.prompt_token_ids, wanted.sampling)
        if wanted.request_id in left and len(got) < len(told.tokens):
            told = type(told)(told.tokens[: len(got)], told.gaps)
        ties.check(wanted.request_id, got, told)
    warm.scheduler.schedule()
    assert not warm.prefixes.tree._pins
    return warm


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [5, pytest.param(500, marks=pytest.mark.full)])
def test_trees_of_conversations(tiny_models, count):
    """Every second tree with a directory, and then again after a restart."""
    ties = Ties()
    queries, hits = [], []

    @settings(
        max_examples=count, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        turns=TURNS,
        shape=SHAPES,
        family=st.sampled_from(FAMILIES),
        max_bytes=st.sampled_from([0, 0, 300_000, 1 << 30]),
    )
    def check(turns: list[dict], shape: dict, family: str, max_bytes: int) -> None:
        model = tiny_models[family]

        @cache
        def reference(prompt: tuple[int, ...], sampling: SamplingParams) -> Plain:
            return plain(model, Request("plain", prompt, sampling), VOCAB, (EOS,))

        with TemporaryDirectory() as folder:
            for _ in range(2 if max_bytes else 1):
                size = max_bytes or 1
                with closing(PrefixStore(Path(folder) / "own", FINGERPRINT, size)) as store:
                    used = store if max_bytes else None
                    warm = play(model, turns, shape, ties, used, reference)
                    assert flush(store)
                    assert store.stats().file_nbytes <= max_bytes
        queries.append(warm.reuse.num_queries)
        hits.append(warm.reuse.num_hits)

    check()
    share = sum(hits) / sum(queries)
    ties.report(f"{len(hits)} trees of conversations, {share:.0%} of their prompts from the cache")
    assert share > 0.05, "hardly anything was found, so hardly anything was tested"
