"""One row's constraint: windows with right and wrong drafts, drafting, budgets, late limits."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.sampling.grammar import Budget
from mlx_mtp.sampling.grammar_masks import Constraint, DraftSampler, GrammarMasks
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from mlx_mtp.sampling.sampler import Sampler, mask_out
from tests.grammars import EOS, THINK_END, TOO_WIDE_WITHIN, compiled, ids

VOCAB = 96
LIST = GrammarSpec("json_schema", '{"type": "array", "items": {"enum": ["ab", 12]}, "maxItems": 3}')
(OPEN,), (BRACE,), (ONE,) = ids("["), ids("{"), ids("1")


def window_masks(constraint: Constraint, drafts: list[int]) -> list[set[int]]:
    """What the guide lets follow the last token and each draft."""
    window = mx.array([[0, *drafts]])
    masks = GrammarMasks([constraint]).window_mask(window)
    if masks is None:
        return [set(range(VOCAB))] * (len(drafts) + 1)
    bits = np.unpackbits(np.array(masks)[0], axis=-1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def singly(spec: GrammarSpec, tokens: list[int]) -> set[int]:
    constraint = Constraint(compiled(spec))
    constraint.advance(tokens)
    assert constraint.error is None
    return window_masks(constraint, [])[0]


def test_a_window_has_the_masks_that_single_tokens_have():
    drafts = ids('["ab"')
    constraint = Constraint(compiled(LIST))
    masks = window_masks(constraint, drafts)
    assert masks == [singly(LIST, drafts[:j]) for j in range(len(drafts) + 1)]
    assert window_masks(constraint, drafts) == masks  # Drafts change nothing.


def test_masks_before_a_wrong_draft_hold_and_the_row_goes_on():
    constraint = Constraint(compiled(LIST))
    drafts = [OPEN, BRACE, ONE, ONE]
    masks = window_masks(constraint, drafts)
    assert masks[0] == singly(LIST, [])
    assert masks[1] == singly(LIST, [OPEN])
    assert BRACE not in masks[1]
    constraint.advance([OPEN, ONE])
    assert constraint.error is None
    assert window_masks(constraint, [])[0] == singly(LIST, [OPEN, ONE])


def test_drafts_after_the_end_of_an_answer_do_no_harm():
    constraint = Constraint(compiled(LIST))
    tokens = ids("[12]")
    masks = window_masks(constraint, [*tokens, EOS, ONE])
    assert masks[len(tokens)] == {EOS}
    constraint.advance([*tokens, EOS])
    assert constraint.error is None


def test_a_token_that_no_mask_allowed_is_an_error_that_stays():
    constraint = Constraint(compiled(LIST))
    constraint.advance([BRACE])
    assert "grammar" in str(constraint.error)
    constraint.advance([OPEN])
    assert constraint.error is not None


@pytest.mark.parametrize("drafts", [[OPEN, BRACE], [OPEN, BRACE, ONE]])
def test_a_limit_met_by_a_draft_counts_only_if_the_answer_comes_there(drafts):
    spec = TOO_WIDE_WITHIN
    met, missed = Constraint(compiled(spec)), Constraint(compiled(spec))
    for constraint in (met, missed):
        masks = window_masks(constraint, drafts)
        assert masks[:2] == [singly(spec, []), singly(spec, [OPEN])]
    met.advance([OPEN, BRACE])
    assert "items" in str(met.error)
    missed.advance([OPEN, ONE])
    assert missed.error is None
    assert window_masks(missed, [])[0] == singly(spec, [OPEN, ONE])


class Tiring:
    """A matcher that fails, for good, at the mask that follows a certain text."""

    def __init__(self, matcher, said=(), failed=False) -> None:
        self.matcher, self.said, self.failed = matcher, list(said), failed

    def deep_copy(self):
        return Tiring(self.matcher.deep_copy(), self.said, self.failed)

    def unsafe_compute_mask_ptr(self, *where) -> None:
        self.failed |= self.said == ids("[12,")
        if not self.failed:
            self.matcher.unsafe_compute_mask_ptr(*where)

    def consume_token(self, token) -> bool:
        self.said.append(token)
        return not self.failed and self.matcher.consume_token(token)

    def rollback(self, count) -> bool:
        del self.said[len(self.said) - count :]
        return not self.failed and self.matcher.rollback(count)

    def is_error(self) -> bool:
        return self.failed or self.matcher.is_error()

    def get_error(self) -> str:
        return "too tired"

    def is_stopped(self) -> bool:
        return self.matcher.is_stopped()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_limit_met_by_a_mask_counts_only_if_a_token_was_drawn_with_it(length):
    """The mask after four of the drafts fails: to keep four tokens is fine, a fifth is not."""
    drafts = ids("[12,12")
    assert drafts[:3] == ids("[12,")
    grammar = dataclasses.replace(compiled(LIST), matcher=Tiring(compiled(LIST).matcher))
    constraint = Constraint(grammar)
    for token in drafts[:3]:
        constraint.drafted(token)
    mask = np.full(3, -1, dtype=np.int32)
    assert not constraint.draft_mask(mask)  # It failed: the draft is not masked.

    matcher = constraint.rewind()
    masks = np.full((len(drafts) + 1, 3), -1, dtype=np.int32)
    for token in drafts[:3]:
        matcher.consume_token(token)
    matcher.unsafe_compute_mask_ptr()  # As the call for the whole window would leave it.
    assert constraint.finish_masks(masks, drafts)
    for j in range(3):
        bits = np.unpackbits(masks[j].view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits).tolist()) == singly(LIST, drafts[:j])
    assert (masks[3:] == -1).all()

    kept = drafts[:length]
    constraint.advance(kept)
    assert (constraint.error is None) == (length <= 3)
    if length == 3:
        # The next window meets it at its first position.
        assert constraint.rewind() is not None
        mask = np.full((1, 3), -1, dtype=np.int32)
        constraint.rewind().unsafe_compute_mask_ptr()
        constraint.finish_masks(mask, [])
        constraint.advance([ONE])
        assert "too tired" in str(constraint.error)


def draft(constraint: Constraint, tokens: list[int]) -> list[set[int]]:
    """Masks of drafts, each told after its mask was made."""
    guide, masks = GrammarMasks([constraint]), []
    for token in tokens:
        mask = guide.draft_mask(1)
        bits = np.full(VOCAB, 1) if mask is None else np.unpackbits(mask, bitorder="little")
        masks.append(set(np.flatnonzero(bits).tolist()))
        guide.drafted(mx.array([[token]]))
    return masks


def test_drafts_are_masked_one_after_the_other_and_taken_back():
    constraint = Constraint(compiled(LIST))
    tokens = ids('["ab",')
    assert draft(constraint, tokens) == [singly(LIST, tokens[:j]) for j in range(len(tokens))]
    assert window_masks(constraint, [])[0] == singly(LIST, [])
    constraint.advance(tokens)
    assert constraint.error is None


def test_drafting_after_an_answer_that_is_over_does_no_harm():
    constraint = Constraint(compiled(LIST))
    constraint.advance(ids("[12]"))
    assert draft(constraint, [EOS, ONE]) == [{EOS}, set(range(VOCAB))]
    assert window_masks(constraint, [])[0] == {EOS}
    constraint.advance([EOS])
    assert constraint.error is None


@pytest.mark.parametrize(
    "tokens", [[*ids("[12]"), EOS, ONE, ONE], [BRACE, ONE], [OPEN, BRACE, ONE]]
)
def test_drafting_past_the_end_or_off_the_grammar_is_taken_back(tokens):
    constraint = Constraint(compiled(TOO_WIDE_WITHIN if BRACE in tokens else LIST))
    spec = TOO_WIDE_WITHIN if BRACE in tokens else LIST
    draft(constraint, tokens)
    assert window_masks(constraint, [])[0] == singly(spec, [])
    constraint.advance([OPEN])
    assert constraint.error is None


def test_the_draft_sampler_reads_each_draft_before_the_next():
    constraint = Constraint(compiled(GrammarSpec("regex", "abc+")))
    params = SamplingParams(max_tokens=9, temperature=0.0)
    sampler = DraftSampler(Sampler([params], [[4]], VOCAB), GrammarMasks([constraint]))
    logits = mx.zeros((1, 1, VOCAB))
    drawn = [sampler.draw(logits, mx.array([[j]]), mx.array([[0]])).item() for j in range(4)]
    assert drawn == [*ids("a"), *ids("b"), *ids("c"), EOS]


BUDGET = GrammarSpec("free", free_until="</think>", free_tokens=3)


def test_a_budget_forces_the_end_and_then_lets_go():
    constraint = Constraint(compiled(BUDGET))
    everything = set(range(VOCAB))
    assert window_masks(constraint, [4, 5, 6, 7]) == [everything] * 3 + [{THINK_END}] * 2
    assert window_masks(constraint, [4, THINK_END, 6, 7]) == [everything] * 5
    assert draft(constraint, [4, 5, 6, THINK_END]) == [everything] * 3 + [{THINK_END}]
    constraint.advance([4, 5, 6])
    assert constraint.active
    assert window_masks(constraint, [THINK_END, 7]) == [{THINK_END}, everything, everything]
    constraint.advance([THINK_END])
    assert not constraint.active
    assert not GrammarMasks([constraint, None])


def test_a_budget_before_a_grammar():
    spec = GrammarSpec("regex", "[0-9]", free_until="</think>", free_tokens=0)
    constraint = Constraint(compiled(spec))
    digits = set(ids("0 1 2 3 4 5 6 7 8 9")) - set(ids(" "))
    masks = window_masks(constraint, [THINK_END, ONE, EOS])
    assert masks[0] == {THINK_END}
    assert masks[1] == digits | {ids("\n")[0]}
    assert masks[2] == {EOS}
    constraint.advance([THINK_END])
    assert constraint.error is None
    assert constraint.active


@settings(max_examples=200, deadline=None)
@given(data=st.data(), limit=st.integers(0, 6), length=st.integers(1, 3))
def test_a_budgets_end_always_comes_in_time(data, limit, length):
    """Whatever is said before it, its tokens are forced after `limit` tokens at the latest."""
    end = tuple(range(length))
    state, said = Budget(limit, end), []
    while not state.over:
        token = state.forced
        token = data.draw(st.integers(0, 3)) if token is None else token
        said.append(token)
        state = state.after(token)
    assert tuple(said[-length:]) == end
    assert len(said) <= limit + length
    assert state.forced is None
    assert state.after(9).over


def test_masks_are_applied_bit_by_bit():
    random = np.random.default_rng(1)
    logits = random.standard_normal((2, 3, VOCAB + 3)).astype(np.float32)
    allowed = random.integers(0, 2, (2, 3, VOCAB + 8)).astype(bool)
    mask = mx.array(np.packbits(allowed, axis=-1, bitorder="little"))
    got = np.array(mask_out(mx.array(logits), mask))
    np.testing.assert_array_equal(got, np.where(allowed[..., : VOCAB + 3], logits, -np.inf))
    ids = np.sort(random.choice(VOCAB, 9, replace=False))
    few = np.array(mask_out(mx.array(logits[..., ids]), mask, mx.array(ids)))
    np.testing.assert_array_equal(few, got[..., ids])


def test_cuts_choose_among_the_tokens_that_are_allowed():
    """top_k of the best tokens would leave none, were the mask applied after it."""
    logits = np.linspace(5, 0, VOCAB, dtype=np.float32)[None, None]
    allowed = np.zeros((1, 1, VOCAB), dtype=bool)
    allowed[..., 90:93] = True
    mask = mx.array(np.packbits(allowed, axis=-1, bitorder="little"))
    params = SamplingParams(max_tokens=1, top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.5)
    sampler = Sampler([params], [[3]], VOCAB)
    scores = sampler.scores(mx.array(logits), mx.array([[7]]), mx.array([[0]]), mask=mask)
    assert np.flatnonzero(np.isfinite(np.array(scores[0, 0]))).tolist() == [90, 91]


def test_a_mask_of_all_ones_changes_no_bit():
    logits = mx.array(np.random.default_rng(0).standard_normal((1, 2, VOCAB)).astype(np.float32))
    ones = mx.full((1, 2, VOCAB // 8), 255, dtype=mx.uint8)
    params = SamplingParams(max_tokens=1, top_p=0.9, seed=4)
    sampler, where = Sampler([params], [[1]], VOCAB), mx.array([[3, 4]])
    window = mx.array([[1, 2]])
    np.testing.assert_array_equal(
        np.array(sampler.scores(logits, where, window, mask=ones)),
        np.array(sampler.scores(logits, where, window)),
    )
