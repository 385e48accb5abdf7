"""One row's constraint: windows with right and wrong drafts, drafting, budgets, late limits."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.sampling.grammar import ThinkingBudget
from mlx_mtp.sampling.grammar_masks import Constraint, GrammarMasks
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from mlx_mtp.sampling.sampler import Sampler, mask_out
from tests.support.grammars import EOS, TOO_WIDE_WITHIN, compiled, ids
from tests.support.harness import PlainMask

VOCAB = 96
LIST = GrammarSpec("json_schema", '{"type": "array", "items": {"enum": ["ab", 12]}, "maxItems": 3}')
BUDGET = GrammarSpec("free", free_until="</think>", free_tokens=3)
SPECS = [
    LIST,
    GrammarSpec("regex", "abc+"),
    BUDGET,
    GrammarSpec("regex", "[0-9]", free_until="</think>", free_tokens=2),
    GrammarSpec("regex", "[0-9]+", free_until="</think>"),
]
(OPEN,), (BRACE,), (ONE,) = ids("["), ids("{"), ids("1")


def allowed(mask: mx.array | np.ndarray | None) -> set[int]:
    if mask is None:
        return set(range(VOCAB))
    bits = np.unpackbits(np.array(mask).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def window_masks(constraint: Constraint, drafts: list[int]) -> list[set[int]]:
    """Returns the tokens allowed after the last token and after each draft."""
    masks = GrammarMasks([constraint]).window_mask(mx.array([[0, *drafts]]))
    count = len(drafts) + 1
    return [allowed(None if masks is None else masks[0, j]) for j in range(count)]


def draft(constraint: Constraint, tokens: list[int]) -> list[set[int]]:
    """Returns the masks of drafts, each of which is consumed after its mask was made."""
    guide, masks = GrammarMasks([constraint]), []
    for token in tokens:
        masks.append(allowed(guide.draft_mask(1)))
        guide.drafted(mx.array([[token]]))
    return masks


def singly(spec: GrammarSpec, tokens: list[int]) -> set[int]:
    """Returns the tokens that llguidance allows after `tokens`, consumed one at a time."""
    plain = PlainMask(compiled(spec))
    for token in tokens:
        plain.consume(token)
    return allowed(plain.mask())


@settings(max_examples=100)
@given(data=st.data(), spec=st.sampled_from(SPECS))
def test_masks_of_windows_and_drafts_are_those_of_single_tokens(data, spec):
    """This holds up to a draft that is not allowed; drafts and rejections leave no trace."""
    constraint, said = Constraint(compiled(spec)), []
    while EOS not in said and len(said) < 12 and constraint.active:
        drafts, true = [], [singly(spec, said)]
        for _ in range(data.draw(st.integers(0, 4))):
            # Mostly an allowed draft, else any; none after the answer's end.
            options = sorted(true[-1]) if data.draw(st.integers(0, 3)) else range(VOCAB)
            drafts.append(data.draw(st.sampled_from(options)))
            if drafts[-1] not in true[-1] or EOS in drafts:
                break
            true.append(singly(spec, said + drafts))
        count = len(true)
        assert draft(constraint, drafts)[:count] == true[: len(drafts)]
        assert window_masks(constraint, drafts)[:count] == true
        assert window_masks(constraint, drafts)[:count] == true, "a window leaves a trace"
        kept = data.draw(st.integers(0, count - 1))
        accepted = [*drafts[:kept], data.draw(st.sampled_from(sorted(true[kept])))]
        constraint.advance(accepted)
        assert constraint.error is None
        said += accepted
    if not constraint.active:
        assert not GrammarMasks([constraint, None])


@pytest.mark.parametrize("drafts", [[OPEN, BRACE], [OPEN, BRACE, ONE]])
def test_a_limit_met_by_a_draft_counts_only_if_the_answer_comes_there(drafts):
    spec = TOO_WIDE_WITHIN
    met, missed = Constraint(compiled(spec)), Constraint(compiled(spec))
    for constraint in (met, missed):
        draft(constraint, drafts)
        assert window_masks(constraint, drafts)[:2] == [singly(spec, []), singly(spec, [OPEN])]
    met.advance([OPEN, BRACE])
    assert "items" in str(met.error)
    missed.advance([OPEN, ONE])
    assert missed.error is None
    assert window_masks(missed, [])[0] == singly(spec, [OPEN, ONE])


@settings(max_examples=200, deadline=None)
@given(data=st.data(), limit=st.integers(0, 6), length=st.integers(1, 3))
def test_a_budgets_end_always_comes_in_time(data, limit, length):
    """The end's tokens are forced after `limit` tokens at the latest, whatever came before."""
    end = tuple(range(length))
    state, said = ThinkingBudget(limit, end), []
    while not state.over:
        token = state.forced
        token = data.draw(st.integers(0, 3)) if token is None else token
        said.append(token)
        state = state.advanced(token)
    assert tuple(said[-length:]) == end
    assert len(said) <= limit + length
    assert state.forced is None
    assert state.advanced(9).over


def test_masks_are_applied_bit_by_bit():
    random = np.random.default_rng(1)
    logits = random.standard_normal((2, 3, VOCAB + 3)).astype(np.float32)
    may_come = random.integers(0, 2, (2, 3, VOCAB + 8)).astype(bool)
    mask = mx.array(np.packbits(may_come, axis=-1, bitorder="little"))
    got = np.array(mask_out(mx.array(logits), mask))
    np.testing.assert_array_equal(got, np.where(may_come[..., : VOCAB + 3], logits, -np.inf))
    some = np.sort(random.choice(VOCAB, 9, replace=False))
    few = np.array(mask_out(mx.array(logits[..., some]), mask, mx.array(some)))
    np.testing.assert_array_equal(few, got[..., some])


def test_cuts_choose_among_the_tokens_that_are_allowed():
    """If the mask were applied after top_k, no token would be left."""
    logits = np.linspace(5, 0, VOCAB, dtype=np.float32)[None, None]
    may_come = np.zeros((1, 1, VOCAB), dtype=bool)
    may_come[..., 90:93] = True
    mask = mx.array(np.packbits(may_come, axis=-1, bitorder="little"))
    params = SamplingParams(max_tokens=1, top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.5)
    sampler, window = Sampler([params], [[3]], VOCAB), mx.array([[0]])
    scores = sampler.scores(mx.array(logits), mx.array([[7]]), window, mask=mask)
    assert np.flatnonzero(np.isfinite(np.array(scores[0, 0]))).tolist() == [90, 91]
