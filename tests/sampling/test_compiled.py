"""The parts of a draw that are compiled on a GPU give the same bits as uncompiled."""

import mlx.core as mx

from mlx_mtp.kernels import gpu
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.verify import verify_window

VOCAB = 3000
ROWS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
]


def test_equal_bits(monkeypatch):
    rows = [SamplingParams(max_tokens=9, seed=seed, **row) for seed, row in enumerate(ROWS)]
    logits = mx.random.normal((len(rows), 3, VOCAB), key=mx.random.key(1)).astype(mx.bfloat16)
    positions = mx.arange(3 * len(rows)).reshape(len(rows), 3)
    ids = mx.arange(0, VOCAB, 7)

    def drawn(backend):
        monkeypatch.setattr(gpu, "backend", lambda: backend)
        found = []
        for chosen in (rows, rows[1:2]):
            sampler, some = Sampler(chosen, [()] * len(chosen), VOCAB), slice(len(chosen))
            window = mx.zeros((len(chosen), 3), dtype=mx.int32)
            scores = sampler.scores(logits[some], positions[some], window)
            tokens = mx.argmax(scores, axis=-1).astype(mx.int32)
            assert mx.array_equal(sampler.draw(logits[some], positions[some], window), tokens)
            few = sampler.scores(logits[some][..., ids], positions[some], window, ids)
            limits = {"remaining": mx.array([2, 9, 9, 9])[some], "num_drafts": None}
            limits["stop_ids"] = tokens[:, :1] * mx.array([1, 0, 0, 0])[some, None]
            limits["finished"] = mx.array([False, False, False, True])[some]
            drafts = mx.concatenate([tokens[:, :1], tokens[:, :2]], axis=1)
            found += [scores, few, *verify_window(tokens, drafts, **limits)]
        return found

    assert all(map(mx.array_equal, drawn("cuda"), drawn(None)))


def test_a_draw_without_parameters_takes_the_logits_as_they_are():
    logits = mx.random.normal((2, 3, VOCAB + 8), key=mx.random.key(2)).astype(mx.bfloat16)
    sampler = Sampler([SamplingParams(max_tokens=9, temperature=0.0)] * 2, [()] * 2, VOCAB)
    given = logits, mx.zeros((2, 3), dtype=mx.int32), mx.zeros((2, 3), dtype=mx.int32)
    assert mx.array_equal(sampler.draw(*given), mx.argmax(sampler.scores(*given), axis=-1))
