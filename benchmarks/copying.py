"""Tokens per second of copies and edits of long texts, copies beside the head over the head alone.

The bundled model computes every step, in the engine, but can't copy a text of more than some
sentences by itself. So what it draws is replaced by the answer, and the head's drafts by the right
ones at a given rate; what is copied is the engine's own. The contenders take turns.

    python -m benchmarks.copying [--tokens 500 1000 2000] [--rate 0.75] [--rounds 2]
"""

import argparse
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx

from benchmarks.contenders import Contender
from mlx_mtp.bench.measure import median
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.bench.report import render
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.drafter import Computed, MTPDrafter
from mlx_mtp.text.tokenizer import Tokenizer

_KINDS = ("copy", "edit")
_EVERY = 8  # sentence that an edit replaces


class Forced:
    """The text that every row is made to write: int32 [L], the token at each position."""

    def __init__(self, rate: float) -> None:
        self.known = mx.zeros(4096, dtype=mx.int32)
        mx.eval(self.known)  # Here: the engines have threads of their own.
        draw, propose = Sampler.draw, MTPDrafter.propose

        def forced_draw(
            sampler: Sampler, logits: mx.array, positions: mx.array, *others: Any, **more: Any
        ) -> mx.array:
            drawn = draw(sampler, logits, positions, *others, **more)
            return mx.where(drawn >= 0, self._at(positions), drawn)  # Computed all the same.

        def forced_propose(
            drafter: MTPDrafter, state: Any, window: Computed, *others: Any
        ) -> mx.array:
            drafts = propose(drafter, state, window, *others)
            first = window.next_position[:, None]
            positions = first + mx.arange(drafts.shape[1])
            right = (positions * 7919) % 1000 < int(rate * 1000)
            return mx.where((drafts >= 0) & right, self._at(positions), 0).astype(mx.int32)

        Sampler.draw = forced_draw  # type: ignore[assignment, method-assign]
        MTPDrafter.propose = forced_propose  # type: ignore[assignment, method-assign]

    def _at(self, positions: mx.array) -> mx.array:
        return self.known[mx.minimum(positions, self.known.shape[0] - 1)]


def text_and_edit(seed: int, count: int, tokenizer: Tokenizer) -> tuple[str, str]:
    """A text of about so many tokens, and the same with other sentences here and there."""
    source = PromptSource(seed)
    sentences = list(_sentences(source, count, tokenizer))
    fresh = _sentences(source, count, tokenizer)
    edited = [next(fresh) if n % _EVERY == 3 else each for n, each in enumerate(sentences)]
    return " ".join(sentences), " ".join(edited)


def _sentences(source: PromptSource, count: int, tokenizer: Tokenizer) -> Iterator[str]:
    while count > 0:
        for sentence in source.next("medium", 1)[0].text.split("\n\n")[0].split(". "):
            if count > 0:
                yield (told := sentence.rstrip(".") + ".")
            count -= len(tokenizer.encode(told))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--rate", type=float, default=0.75, help="of the head's right drafts")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    forced = Forced(given.rate)
    tokenizer, model = Tokenizer.load(BUNDLED_MODEL), load_model(BUNDLED_MODEL, enable_mtp=True)
    rates: dict[tuple[str, int, str], list[float]] = {}
    names = ("mtp", "mtp,copy")
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(Contender(n, model, tokenizer, "auto", 1, 64, drafts=n))
            for n in names
        ]
        for number in range(-1, given.rounds):
            for kind, count in itertools.product(_KINDS, given.tokens):
                before, edited = text_and_edit(number + 1, count, tokenizer)
                asked = f"{kind}: {before}"
                prompt = tokenizer.encode_chat([{"role": "user", "content": asked}])
                answer = tokenizer.encode(before if kind == "copy" else edited)
                forced.known = mx.array([*prompt, *answer, 0], dtype=mx.int32)
                mx.eval(forced.known)
                sampling = SamplingParams(len(answer), temperature=0.0, ignore_eos=True)
                for engine in engines[:: 1 if number % 2 else -1]:
                    ((found, outputs),) = engine.run([(prompt, sampling)])
                    assert [t for out in outputs for t in out.token_ids] == list(answer)
                    if number >= 0 and found.decoding_rate:
                        key = kind, count, engine.name
                        rates.setdefault(key, []).append(found.decoding_rate)
    rows, ratios = [], []
    for kind, count in itertools.product(_KINDS, given.tokens):
        alone, both = (rates[kind, count, name] for name in names)
        ratios.append([b / a for a, b in zip(alone, both, strict=True)])
        cells = (f"{median(each):.0f}" for each in (alone, both))
        rows.append([f"{kind}, {count} tokens", *cells, f"{median(ratios[-1]):.2f}"])
    print(render(["answer", *names, "ratio"], rows))
    print(f"{BACKEND}; the head is right at {given.rate:.0%}; {given.rounds} rounds, one request.")
    print(f"mtp,copy over mtp: {median(r for own in ratios for r in own):.3f}")


if __name__ == "__main__":
    main()
