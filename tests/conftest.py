"""Fixtures for all tests. The backend is prepared before anything imports mlx."""

from mlx_mtp import backend
from tests.support.bound_torch import load_torch

load_torch()
backend.prepare()

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest

from mlx_mtp import settings
from mlx_mtp.cache import layout
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from tests.support.cases import EOS, make_requests
from tests.support.harness import MEASURED, Plain, Ties, plain
from tests.support.process import Server, running
from tests.support.tiny_models import FAMILIES, VOCAB, Layout, write_checkpoint

# On a busy machine any example can take longer than hypothesis's default deadline of 200 ms.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")

DEMO = Path(backend.__file__).parent / "demo"
DENSE_DEMO = Path(__file__).parent / "data" / "dense-demo"

# Servers that tests start must store nothing in the user's own directories.
for _variable in ("MLX_MTP_CACHE_DIR", "XDG_RUNTIME_DIR"):
    os.environ[_variable] = tempfile.mkdtemp(prefix="mlx-mtp-tests-")
    atexit.register(shutil.rmtree, os.environ[_variable], ignore_errors=True)
# Nor must they read the user's settings.
os.environ[settings.VARIABLE] = ""
settings.USER_FILE = Path(os.environ["MLX_MTP_CACHE_DIR"], "none.toml")


@pytest.fixture(scope="session")
def demo_model() -> LoadedModel:
    """The bundled model with its head."""
    return load_model(DEMO, enable_mtp=True)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """A random model of each family, with a random head."""
    root = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        write_checkpoint(root / family, Layout(family, stacked_experts=family == "qwen3_5_moe"))
    return {family: load_model(root / family, enable_mtp=True) for family in FAMILIES}


@pytest.fixture(scope="session")
def mtp_server() -> Iterator[Server]:
    """A server process for all tests that don't stop it: with MTP and prefix cache, in float32."""
    flags = ("--enable-mtp", "--calibration-seconds", "0.5", "--prefix-cache-size", "200MB")
    with running(*flags, "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def references(tiny_models: dict[str, LoadedModel]):
    """`of(family, kind)`: plain decoding's answers to `make_requests(kind)`, each computed once."""

    @cache
    def of(family: str, kind: str) -> dict[str, Plain]:
        model = tiny_models[family]
        return {r.request_id: plain(model, r, VOCAB, (EOS,)) for r in make_requests(kind)}

    return of


@pytest.fixture(scope="module")
def ties(request: pytest.FixtureRequest) -> Iterator[Ties]:
    """Collects differences at rounding ties in a test file, and reports them at its end."""
    met = Ties()
    yield met
    met.report(request.module.__name__)


@pytest.fixture
def small_classes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of more than 512 tokens count as long, so that short tests reach every layout."""
    layout.rounded_capacity.cache_clear()
    monkeypatch.setattr(layout, "_BLOCK", 1024)
    yield
    layout.rounded_capacity.cache_clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of `mtp_server` first, so that only one of several processes starts it."""
    items.sort(key=lambda item: "mtp_server" not in getattr(item, "fixturenames", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tests' measurements, such as rounding ties and acceptance rates."""
    if MEASURED:
        terminalreporter.section("measured")
        for line in MEASURED:
            terminalreporter.write_line(line)
