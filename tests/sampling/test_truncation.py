"""The cheap cuts keep the same tokens as a full sort, bit for bit, ties and masks included."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.sampling.truncation import Truncation, largest, largest_ids

# Multiples of a block and others; below and above 128, the minimum number of sorted tokens.
SIZES = [1, 5, 127, 129, 511, 512, 2049, 4096, 9001, 20_000]

cuts = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 20, 64, 65, 300, 1024, 1025, 5000, 1 << 31]),
    top_p=st.sampled_from([1.0, 1 - 1e-9, 0.9999, 0.95, 0.8, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.9, 1.0]),
)


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    """Runs tests on the CPU, whose sums are sequential; a GPU's depend on the number of addends."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


KINDS = {
    "normal": lambda x, random: x,
    # Like a real model's logits, many of which are equal.
    "bfloat16": lambda x, random: mx.array(x).astype(mx.bfloat16).astype(mx.float32),
    "a few values": lambda x, random: np.round(x / 3),
    "equal": lambda x, random: np.full_like(x, random.choice([0.0, -7.5])),
    "steep": lambda x, random: x * 40,
    # A mask always allows some token.
    "masked": lambda x, random: np.where(
        (random.random(x.shape) < random.choice([0.1, 0.9, 0.999])) & (x != x.max(-1)[..., None]),
        -np.inf,
        x,
    ),
    "signed zeros": lambda x, random: np.copysign(np.zeros_like(x), x),
}
kinds = st.sampled_from(list(KINDS))


def make_logits(shape: tuple[int, ...], kind: str, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    x = (3 * random.standard_normal(shape)).astype(np.float32)
    return np.array(KINDS[kind](x, random)).astype(np.float32)


def by_sorting(logits: mx.array, rows: list[SamplingParams]) -> mx.array:
    """Cut as the parameters are defined, row by row; a greedy row is not cut."""
    out = []
    for x, p in zip(logits, rows, strict=True):
        least = mx.full((x.shape[0], 1), -mx.inf)
        if not p.greedy:
            ordered = mx.sort(x, axis=-1)[..., ::-1]
            kth = min(p.top_k or x.shape[-1], x.shape[-1]) - 1
            left = mx.where(ordered >= ordered[:, kth : kth + 1], ordered, -mx.inf)
            shares = mx.softmax(left, axis=-1, precise=True)
            stays = mx.cumsum(shares, axis=-1) - shares < mx.array(p.top_p)
            stays = mx.ones_like(stays) if mx.array(p.top_p) >= 1.0 else stays
            stays[:, 0] = True
            by_p = mx.min(mx.where(stays, left, mx.inf), axis=-1, keepdims=True)
            least = mx.maximum(ordered[:, kth : kth + 1], by_p)
            if p.min_p:
                least = mx.maximum(least, ordered[:, :1] + mx.log(mx.array(p.min_p)))
        out.append(mx.where(x >= least, x, -mx.inf))
    return mx.stack(out)


def same_bits(a: mx.array, b: mx.array) -> bool:
    return np.array(a).tobytes() == np.array(b).tobytes()


@settings(max_examples=200)
@given(
    rows=st.lists(cuts, min_size=1, max_size=4),
    length=st.integers(1, 3),
    size=st.sampled_from(SIZES),
    kind=kinds,
    seed=st.integers(0, 9999),
)
def test_the_tokens_that_stay_are_those_of_the_full_sort(rows, length, size, kind, seed):
    logits = mx.array(make_logits((len(rows), length, size), kind, seed))
    truncation = Truncation(rows, size)
    assert bool(truncation) == any(
        not p.greedy and (p.top_k, p.top_p, p.min_p) != (0, 1.0, 0.0) for p in rows
    )
    got = truncation.apply(logits)
    assert same_bits(got, by_sorting(logits, rows))
    alone = [Truncation([p], size).apply(logits[i : i + 1]) for i, p in enumerate(rows)]
    assert same_bits(got, mx.concatenate(alone)), "a row depends on its neighbours"


def test_what_stays_of_five_tokens():
    for cut, kept in (
        ({"top_p": 0.3}, 1),
        ({"top_p": 0.45}, 3),  # the token that crosses top_p stays, and its tie
        ({"top_k": 2}, 3),  # all tokens that tie with the last one stay
        ({"top_k": 4, "top_p": 0.9}, 4),
        ({"top_k": 3, "min_p": 0.6}, 1),
        ({}, 5),
    ):
        shares = mx.array([[[0.4, 0.2, 0.2, 0.15, 0.05]]])
        got = Truncation([SamplingParams(max_tokens=1, **cut)], 5).apply(mx.log(shares))
        assert mx.isfinite(got).tolist() == [[[i < kept for i in range(5)]]], cut


@settings(max_examples=80)
@given(
    size=st.sampled_from(SIZES),
    count=st.sampled_from([1, 3, 20, 128, 2048, 9001]),
    kind=kinds,
    seed=st.integers(0, 9999),
)
@example(size=20_000, count=5, kind="equal", seed=0)
def test_the_largest_are_the_head_of_a_stable_sort(size, count, kind, seed):
    values = make_logits((2, 3, size), kind, seed)
    got = np.array(largest(mx.array(values), count))
    np.testing.assert_array_equal(got, np.sort(values, axis=-1)[..., ::-1][..., :count])
    ids = np.array(largest_ids(mx.array(values), count))
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, np.argsort(-values, axis=-1, kind="stable")[..., :count])


def test_no_more_is_sorted_than_asked_for(monkeypatch):
    """A usual request of a real model never sorts the vocabulary, nor does `logprobs: true`."""
    sorted_sizes = []
    for name in ("sort", "argsort", "partition", "argpartition"):
        real = getattr(mx, name)

        def spy(values, *where, axis, real=real):
            sorted_sizes.append(values.shape[axis])
            return real(values, *where, axis=axis)

        monkeypatch.setattr(mx, name, spy)
    rows = [
        SamplingParams(max_tokens=1, temperature=0.6, top_k=20, top_p=0.95, top_logprobs=0),
        SamplingParams(max_tokens=1, min_p=0.05),
        SamplingParams(max_tokens=1, temperature=0.0, top_p=0.5),
        SamplingParams(max_tokens=1),
    ]
    logits = mx.array(make_logits((4, 1, 20_000), "normal", 0))
    at = mx.zeros((4, 1), dtype=mx.int32)
    sampler = Sampler(rows, [[1]] * 4, 20_000)
    mx.eval(sampler.draw(logits, at, at), sampler.logprobs(logits, at))
    assert sorted_sizes
    assert max(sorted_sizes) < 4000
    mx.eval(Sampler([SamplingParams(max_tokens=1, top_p=0.5)], [[1]], 20_000).draw(logits, at, at))
    assert max(sorted_sizes) == 20_000
