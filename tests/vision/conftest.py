import pytest

from mlx_mtp.models.loader import load_model
from tests.support.cases import EOS
from tests.support.tiny_models import VOCAB, Layout, write_checkpoint
from tests.vision.seeing import slow


@pytest.fixture(scope="session")
def seeing_models(tmp_path_factory):
    """A tiny model of each family that has a vision tower."""
    root = tmp_path_factory.mktemp("seeing")
    for family in ("qwen3_5", "qwen3_5_moe"):
        stacked = family == "qwen3_5_moe"
        write_checkpoint(root / family, Layout(family, stacked_experts=stacked, sees=True))
    return {
        family: load_model(root / family, enable_mtp=True) for family in ("qwen3_5", "qwen3_5_moe")
    }


@pytest.fixture(scope="session")
def slowly(seeing_models):
    """`of(family, request)` returns the slow reference's answer; each is computed once."""
    known = {}

    def of(family, wanted):
        key = family, wanted.request_id, wanted.prompt_token_ids
        if key not in known:
            stops = () if wanted.sampling.ignore_eos else (EOS,)
            known[key] = slow(seeing_models[family], wanted, VOCAB, stops)
        return known[key]

    return of
