"""The arithmetic and the verdicts of the self-test."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_mtp.engine.request import RequestOutput
from mlx_mtp.kernels.cases import Shape
from mlx_mtp.selftest import kernels, machine
from mlx_mtp.selftest.budget import Budget
from mlx_mtp.selftest.equality import BuiltIn, Equality, Parting, Recorder, Reference, compare
from mlx_mtp.selftest.kernels import KernelCheck, check_kernels
from mlx_mtp.selftest.machine import Machine, ModelFacts
from mlx_mtp.selftest.report import Report


class Scripted:
    """A subject that gives every prompt its answer.

    Args:
        answers: steps of each: tokens, drafts and how many of them were accepted.
    """

    name = "scripted"

    def __init__(self, recorder, answers):
        self.recorder = recorder
        self.given = answers

    def answers(self, requests):
        for request, steps in zip(requests, self.given, strict=True):
            for tokens, drafts, accepted in steps:
                output = RequestOutput(
                    request.request_id,
                    tuple(tokens),
                    num_draft_tokens=drafts,
                    num_accepted_tokens=accepted,
                )
                self.recorder.observe([output])


def compared(answers, references, are_chats=(True, True)):
    recorder = Recorder()
    prompts = [BuiltIn((1,), is_chat) for _, is_chat in zip(answers, are_chats)]
    return compare(Scripted(recorder, answers), recorder, prompts, references)


def test_equal_answers_and_what_was_accepted():
    answers = [[([1], 0, 0), ([2, 3], 2, 1), ([4], 2, 0)], [([5, 6, 7], 2, 2)]]
    found = compared(answers, [Reference((1, 2, 3, 4), (9,) * 4), Reference((5, 6, 7), (9,) * 3)])
    assert (found.answers, found.tokens, found.identical, found.partings) == (2, 7, 7, ())
    assert found.accepted == (2 / 3, 1 / 3)
    assert found.ok(strict=True)


def test_raw_tokens_say_nothing_about_acceptance():
    answers = [[([1, 2], 1, 1)], [([5], 1, 0)]]
    found = compared(answers, [Reference((1, 2), (9, 9)), Reference((5,), (9,))], (True, False))
    assert found.accepted == (1.0,)
    assert found.identical == 3


@pytest.mark.parametrize(
    ("got", "parting", "identical"),
    [
        ([1, 9, 3], Parting(0, 1, 0.5), 1),
        ([1, 2], Parting(0, 2, 2e-5), 2),
        ([1, 2, 3, 4], Parting(0, 3, None), 3),
    ],
)
def test_where_answers_part(got, parting, identical):
    found = compared([[(got, 0, 0)]], [Reference((1, 2, 3), (0.1, 0.5, 2e-5))])
    assert found.partings == (parting,)
    assert found.identical == identical
    assert found.accepted == ()
    # Only a tie excuses it, and only where all digits are computed with is it judged.
    assert found.ok(strict=True) == (parting.gap == 2e-5)
    assert found.ok(strict=False)


def test_a_failed_engine_is_never_all_right():
    assert not Equality("E", 0, 0, 0, problem="ill").ok(strict=False)


@pytest.mark.parametrize(
    ("difference", "ok"), [(9e-5, True), (1.1e-4, False), (float("nan"), False)]
)
def test_tolerance(difference, ok):
    assert KernelCheck("k", "s", "float32", difference).ok == ok
    assert not KernelCheck("k", "s", "float32", problem="no").ok


def test_a_wrong_chunkwise_form_is_found(monkeypatch):
    monkeypatch.setattr(kernels.gpu, "backend", lambda: None)
    shapes = {"small": Shape(1, 32, 2, 8)}
    assert all(check.ok for check in check_kernels(shapes))
    right = kernels.chunkwise.run

    def wrong(q, window, state, **more):
        y, after, pending = right(q, window, state, **more)
        return y, 1.001 * after, pending

    monkeypatch.setattr(kernels.chunkwise, "run", wrong)
    assert [check.ok for check in check_kernels(shapes)] == [False, True]


@pytest.mark.parametrize(
    ("dtype", "gpu", "tf32", "exact"),
    [
        (mx.float32, None, None, True),
        (mx.float32, "cuda", None, False),
        (mx.float32, "cuda", "0", True),
        (mx.bfloat16, "cuda", "0", False),
        (mx.bfloat16, None, None, False),
    ],
)
def test_where_only_ties_excuse_a_difference(monkeypatch, dtype, gpu, tf32, exact):
    monkeypatch.setattr(machine.gpu, "backend", lambda: gpu)
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    if tf32 is not None:
        monkeypatch.setenv("MLX_ENABLE_TF32", tf32)
    assert machine.computes_exactly(dtype) == exact


def test_budget():
    now = iter([10.0, 12.0, 13.0, 99.0])
    budget = Budget(5.0, clock=lambda: next(now))
    assert budget.spent() == 2.0
    assert budget.left() == 2.0
    assert budget.left() == 0.0


def report(**more) -> Report:
    here = Machine({"mlx": "1"}, "os", "a | b", 8 << 30, "cuda", "mlx on CUDA")
    facts = ModelFacts("m", "qwen3_next", "bfloat16", "4 bits, groups of 64", "mtp.safetensors")
    fields = {"kernels": (), "equality": (), "strict": False, "speed": None, "skipped": ()}
    return Report(machine=here, model=facts, seconds=1.0, **fields | more)


def test_the_table_has_every_part_and_every_line_the_same_width():
    parted = Equality("MTP, k = 1", 2, 96, 90, (Parting(1, 4, 0.125),) * 5, (0.9, 0.8))
    table = report(
        kernels=(
            KernelCheck("k", "80B", "bfloat16", 2e-6),
            KernelCheck("k", "x", "f", applies=False),
        ),
        equality=(parted,),
        skipped=("speed (no time left)",),
    ).table()
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert all(line.count("|") == 4 for line in lines)
    assert "a / b, 8 GiB" in table
    assert "90 of 96 (2 answers); part at answer 2, token 5, runner-up 1.2e-01 behind" in table
    assert "; 2 more" in table
    assert "90.0%, 80.0%" in table
    assert "off by 2.0e-06 at most" in table
    assert "FAILED" not in table


def test_failures_are_named():
    bad = KernelCheck("inputs kernel / portable", "80B", "bfloat16", problem="error: x")
    parted = Equality("MTP, k = 2", 1, 9, 3, (Parting(0, 3, 0.5),))
    found = report(kernels=(bad,), equality=(parted,))
    assert found.failures == ["inputs kernel / portable, 80B, bfloat16"]
    assert "error: x" in found.table() and "FAILED" in found.table()
    assert report(equality=(parted,), strict=True).failures == ["MTP, k = 2"]
