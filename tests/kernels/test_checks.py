"""What compares the kernels, on an emulated GPU: it passes, and a wrong kernel fails it."""

from __future__ import annotations

import mlx.core as mx
import pytest

from benchmarks import kernel_checks, kernel_timings
from benchmarks.kernel_checks import Variant, check_inputs, check_recurrence
from mlx_mtp.kernels import gated_delta_kernel
from mlx_mtp.kernels.cases import Cases, Shape
from mlx_mtp.selftest.kernels import check_kernels

SMALL = Variant(mx.float32, 2, 32)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """An emulated GPU is slow."""
    monkeypatch.setattr(kernel_checks, "WINDOWS", (1, 2, 5))
    monkeypatch.setattr(kernel_checks, "PREVIOUS", (0, 1, 3))
    monkeypatch.setattr(Variant, "shape", Shape(1, 32, 2, 32))


def test_the_grid_of_the_benchmark(emulated):
    found = check_recurrence(SMALL)
    assert found.ok and found.cases == 9 and found.worst > 0
    assert check_inputs(SMALL).ok


def test_a_wrong_kernel_fails_it(emulated, monkeypatch):
    kernel = gated_delta_kernel._KERNEL
    wrong = kernel.body.replace("* strength", "", 1)
    assert wrong != kernel.body
    monkeypatch.setattr(kernel, "body", wrong)
    assert not check_recurrence(SMALL).ok
    found = {
        c.name: c for c in check_kernels({"small": Shape(1, 32, 2, 32)}) if c.dtype == "float32"
    }
    assert not found["gated delta kernel / portable"].ok
    assert found["inputs kernel / portable"].ok


def test_self_test_of_a_kernel_that_does_not_compile(emulated, monkeypatch):
    monkeypatch.setattr(gated_delta_kernel._KERNEL, "body", "nonsense")
    first = check_kernels({"small": Shape(1, 32, 2, 32)})[0]
    assert not first.ok and first.difference is None
    assert "does not compile" in first.problem


def test_shapes_that_the_kernels_are_not_made_for(emulated):
    found = check_kernels({"odd": Shape(1, 48, 2, 48)})
    assert len(found) == 4
    assert all(check.ok and not check.applies for check in found)


@pytest.mark.parametrize("verify", [True, False])
def test_what_is_timed_computes_the_same_call_after_call(emulated, verify):
    cases = Cases(0, Shape(1, 32, 2, 32), mx.float32)
    steps = kernel_timings.contenders(cases, 2, 3, verify=verify)
    assert set(steps) == {"kernel", "mlx-lm's loop", "chunkwise"}
    for _ in range(3):
        y, *others = (step()[0] for step in steps.values())
        assert all(mx.allclose(y, other, atol=1e-5) for other in others)
