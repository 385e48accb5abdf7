"""Results of the check for exact answers: the default, the banner, the routes, the ledger."""

import re
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.calibration import exactness
from mlx_mtp.calibration.exactness import Exactness, decide_exact, exactness_of
from mlx_mtp.cli.banner import answers_text
from mlx_mtp.config import EngineConfig
from mlx_mtp.kernels import gpu, row_check
from mlx_mtp.models.gemm import exact
from mlx_mtp.models.gemm.exact import EVERY, batch_invariant
from mlx_mtp.models.gemm.routes import Routes, routes_of, set_routes

ROOT = Path(__file__).parents[1]


def found(faults=(), costs=(0.0,)) -> Exactness:
    by_rows = dict(zip((1, 4), costs))
    named = dict.fromkeys(faults, "a row depends on the others")
    return Exactness(checked=["a", "b"], faults=named, costs=by_rows, seconds=1.0)


@pytest.mark.parametrize(
    ("check", "wanted", "is_exact", "told"),
    [
        (found(), None, True, "exact: the same with MTP on or off"),
        (found(costs=(0.05, -0.2)), None, True, "+5% of a step"),
        (found(costs=(0.01, 0.06)), None, False, "--exact makes them the same to the bit"),
        (found(costs=(0.01, 0.06)), True, True, "to the bit"),
        (found(), False, False, "can differ where two tokens are about equally likely"),
        (
            found(faults=["b"]),
            None,
            False,
            "not exact, b: a row depends on the others. Answers can",
        ),
        (found(faults=["a", "b"]), True, True, "not exact, a: a row depends on the others, and 1"),
    ],
)
def test_what_a_check_decides_and_what_the_banner_says(monkeypatch, check, wanted, is_exact, told):
    monkeypatch.setattr(gpu, "backend", lambda: "metal")
    monkeypatch.setattr(exactness, "_checked", lambda *_: check)
    model = SimpleNamespace(
        can_be_exact=True,
        resolve_exact=lambda given: True if given is None else given,
        model=nn.Linear(2, 2),
        dtype=mx.bfloat16,
    )
    decided = decide_exact(model, wanted)
    assert decided == is_exact
    assert told in answers_text(EngineConfig(exact=decided), model)


def test_a_check_that_fails_is_a_fault_and_elsewhere_there_is_none(monkeypatch):
    def broken():
        raise RuntimeError("no memory")

    model = SimpleNamespace(can_be_exact=True, model=nn.Linear(2, 2), dtype=mx.bfloat16)
    assert exactness_of(model) is None, "not on Metal"
    monkeypatch.setattr(gpu, "backend", lambda: "metal")
    monkeypatch.setattr(exactness, "_checks", lambda *_: iter([("x", broken), ("y", lambda: None)]))
    monkeypatch.setattr(exactness, "_cost", lambda *_: 0.0)
    assert exactness_of(model).faults == {"x": "RuntimeError: no memory"}
    assert exactness_of(SimpleNamespace(can_be_exact=False)) is None


@pytest.mark.parametrize("wanted", [None, True])
def test_a_check_that_no_flag_asks_for_ends_in_seconds(monkeypatch, wanted):
    """The default check ends after 5 s, by a clock that advances 2 s with each operation."""
    now, compared = [0.0], list[str]()

    def compare(name: str) -> None:
        compared.append(name)
        now[0] += 2

    monkeypatch.setattr(gpu, "backend", lambda: "metal")
    monkeypatch.setattr(exactness, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        exactness, "_checks", lambda *_: ((n, lambda n=n: compare(n)) for n in "abcdefghij")
    )
    monkeypatch.setattr(exactness, "_cost", lambda *_: 0.0)
    model = SimpleNamespace(
        can_be_exact=True,
        resolve_exact=lambda given: True if given is None else given,
        model=nn.Linear(2, 2),
        dtype=mx.bfloat16,
    )
    assert decide_exact(model, wanted) == bool(wanted)
    assert "".join(compared) == ("abcdefghij" if wanted else "abc")
    told = answers_text(EngineConfig(exact=bool(wanted)), model)
    late = "not exact, the check: it ended after 5 s, with 3 operations compared; --exact gives"
    assert (late in told) == (not wanted), told


def test_products_and_steps_end_in_seconds(monkeypatch):
    """Long comparisons check the time while they run."""

    def late() -> None:
        raise TimeoutError

    model = Products()
    monkeypatch.setattr(exact, "kinds_of", lambda *_: {"one": [model.served]})
    with pytest.raises(TimeoutError):
        exact.one_order_faults(model, mx.bfloat16, late)
    assert "one_order_faults" not in vars(model), "they are compared when they are needed"
    with pytest.raises(TimeoutError):
        exactness._Steps(SimpleNamespace(make_cache=lambda _: None), [[1]], late)


@pytest.mark.parametrize("where", ["beside", 2, 40, None])
def test_a_dependence_on_other_rows_or_on_the_place_is_seen(where):
    rows = mx.random.normal((2 * row_check.ROWS[-1], 4), key=mx.random.key(0))

    def run(part: slice) -> list[mx.array]:
        x = rows[part]
        if where == "beside" and len(x) == 33:
            x = x + 1e-6
        if isinstance(where, int):
            x = mx.concatenate([x[:where], 1.001 * x[where:]])
        return [x]

    assert row_check.same_rows(run) == (where is None)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.served, self.faulty = (
            nn.QuantizedLinear(64, 96, False),
            nn.QuantizedLinear(64, 32, False),
        )
        self.plain, self.mtp = nn.Linear(64, 96), nn.QuantizedLinear(64, 48, False)
        self.set_dtype(mx.bfloat16)


def test_routes_of_exact_steps_on_metal(monkeypatch):
    """Exact steps use one order of sums for all row counts, or blocks where the kernel is wrong."""
    model = Products()
    usual = Routes(range(2, 17), gaps=(range(5, 6),))
    for layer in (model.served, model.mtp):
        set_routes(layer, usual)
    monkeypatch.setattr(gpu, "backend", lambda: "metal")
    monkeypatch.setattr(
        exact, "_one_order_fault", lambda layer, _: "wrong" if len(layer.weight) == 32 else None
    )
    with batch_invariant(model, mx.bfloat16):
        assert routes_of(model.served) == Routes(EVERY, one_order=True, in_blocks=True)
        for layer in (model.faulty, model.plain):
            assert routes_of(layer) == Routes(in_blocks=True)
        assert routes_of(model.mtp) == usual, "no answer depends on the head's bits"
    assert [routes_of(model[name]) for name in model] == [usual, Routes(), Routes(), usual]
    assert [usual.serves(rows) for rows in (1, 4, 5, 6, 17)] == [False, True, False, True, False]


def test_the_ledger_names_each_kernel_and_its_evidence():
    """docs/exact.md names a test that exists, or a file of mlx that was read."""
    page = (ROOT / "docs/exact.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    rows = [row for row in rows if row[3].startswith(("emulated: ", "by reading: "))]
    assert len(rows) >= 18
    for _, _, _, evidence in rows:
        if evidence.startswith("by reading: "):
            assert re.search(r"`mlx/backend/metal/\w+\.cpp`", evidence), evidence
            continue
        file, test = re.findall(r"`([^`]+)`", evidence)
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), test
    named = " ".join(row[1] for row in rows)
    kernels = ["router", "gated_delta_inputs", "gated_delta", "add_norm", "mix_norm", "gated_norm"]
    for kernel in [*kernels, "gate", "norm_rotate", "attention_blocks", "few_rows_lanes"]:
        assert f"`{kernel}`" in named
