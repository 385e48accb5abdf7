"""Engines with a prefix cache, and their answers beside plain decoding's."""

import numpy as np

from mlx_mtp.cache.prefix_store import PrefixStore
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request
from mlx_mtp.models.loaded import LoadedModel
from tests.cache.prefixes import PATIENCE
from tests.engine.cases import EOS, STEP
from tests.harness import Driver, Ties, plain
from tests.tiny_models import VOCAB

ROOM = 64 << 20


def words(seed: int, count: int) -> list[int]:
    """Random tokens that are no turn end."""
    return [int(t) for t in np.random.default_rng(seed).integers(2, VOCAB, count)]


def driver(
    model: LoadedModel,
    depth: int | str = 2,
    store: PrefixStore | None = None,
    vocab_size: int = VOCAB,
    min_gain: int = 4,
    **settings: object,
) -> Driver:
    settings = {"prefill_step_size": STEP, "prefix_cache_size": ROOM} | settings
    config = EngineConfig(num_draft_tokens=depth, **settings)
    run = Driver(
        model, vocab_size=vocab_size, stop_ids=(EOS,), config=config, min_gain=min_gain, store=store
    )
    run.store = store
    return run


def ask(run: Driver, *wanted: Request) -> None:
    """Run requests to their ends, together; what they save is on the disk then."""
    for each in wanted:
        run.add(each)
    run.run()
    assert run.store is None or run.store.flush(PATIENCE)


def check(run: Driver, model: LoadedModel, ties: Ties, *wanted: Request) -> None:
    for each in wanted:
        stops = () if each.sampling.ignore_eos else (EOS,)
        reference = plain(model, each, VOCAB, stops)
        ties.check(each.request_id, run.tokens(each.request_id), reference)
