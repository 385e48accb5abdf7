"""Plain decoding's answers, computed once for all files."""

from functools import cache

import pytest

from mlx_mtp.models.model import LoadedModel
from tests.engine.cases import EOS, make_requests
from tests.harness import Plain, plain
from tests.tiny_models import VOCAB


@pytest.fixture(scope="session")
def references(tiny_models: dict[str, LoadedModel]):
    @cache
    def of(family: str, kind: str) -> dict[str, Plain]:
        model = tiny_models[family]
        return {r.request_id: plain(model, r, VOCAB, (EOS,)) for r in make_requests(kind)}

    return of
