"""What a reduced draft vocabulary gives: acceptance and speed, or the cost of a draft on a GPU.

    python -m benchmarks.draft_vocab [--sizes 256,512,1024,2048] [--rows 1,4] [--rounds 5]
    python -m benchmarks.draft_vocab --shape Qwen3.5-27B [--bits 4] [--rows 1,4,16,32]

The first runs the bundled model, offline: the vocabularies take turns, round after round, and the
ratios are of the same round. The second builds a model with random weights whose head, embedding
and lm_head have the full shape (its trunk, which drafts don't use, has four layers), and measures
one draft: a pass of the head, lm_head and the draw. Random weights accept nothing that could be
counted, so what a smaller vocabulary loses has to come from a real model.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx

from benchmarks.contenders import Contender, take_turns
from benchmarks.shapes import build, integers
from mlx_mtp.bench.report import check_writable, write_json
from mlx_mtp.cache.packing import Packing
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import DraftHead, LoadedModel
from mlx_mtp.models.published import SHAPES
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.drafter import Computed, MTPDrafter
from mlx_mtp.text.draft_vocab import draft_vocabulary
from mlx_mtp.text.tokenizer import Tokenizer

WHOLE = "whole"
_MANY = 8
"""Drafts of a long recursion; one draft is the difference to a short one, shared out."""
_WAYS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "sampled": SamplingParams(max_tokens=1, temperature=0.7, top_p=0.8, top_k=20),
}


def measure_bundled(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Acceptance and speed of each vocabulary, and the ratio to the whole one."""
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    model = load_model(BUNDLED_MODEL, enable_mtp=True)
    vocabularies: dict[str, tuple[int, ...] | None] = {WHOLE: None}
    for size in options.sizes:
        if size < model.vocab_size:
            vocabularies[str(size)] = draft_vocabulary(size, tokenizer, model.vocab_size)
    found = []
    for rows in options.rows:
        contenders = [
            Contender(name, model, tokenizer, options.depth, rows, options.max_tokens, ids)
            for name, ids in vocabularies.items()
        ]
        for name, summary in take_turns(contenders, rows, options.rounds, WHOLE).items():
            line = {
                "rows": rows,
                "depth": options.depth,
                "vocabulary": name,
                "acceptance": summary["accepted"],
                "tokens_per_second": summary["rate"],
                "wall_ratio": summary["rate_ratio"],
                "cpu_ratio": summary["cpu_ratio"],
            }
            found.append(line)
            print(
                f"{rows:2} rows, {name:>5} tokens: {line['acceptance']:6.1%} accepted, "
                f"{line['tokens_per_second']:6.0f} tokens/s, ratio to the whole vocabulary "
                f"{line['wall_ratio']:.2f} (processor time {line['cpu_ratio']:.2f})",
                flush=True,
            )
    return found


def measure_shape(
    config: dict[str, Any], bits: int, rows: Many[int], sizes: Many[int], repeats: int
) -> list[dict[str, Any]]:
    """Milliseconds of one draft with each vocabulary; every size takes its turn in each repeat.

    Args:
        config: as in config.json; the trunk is cut to as many layers as have all kinds.
        bits: 4 or 8.
        rows: numbers of rows.
        sizes: of vocabularies, beside the whole one.
        repeats: the median is taken of.
    """
    inner = config.get("text_config", config)
    cut = {"num_hidden_layers": inner["full_attention_interval"]}
    shape = {**config, "text_config": {**inner, **cut}} if inner is not config else config | cut
    model, _ = build(shape, bits)
    heads: dict[str, DraftHead | None] = {WHOLE: None}
    for size in sizes:
        if size < model.vocab_size:
            heads[str(size)] = DraftHead(model, range(size))
    found = []
    for count in rows:
        for way, params in _WAYS.items():
            drafts = {name: _draft(model, head, count, params) for name, head in heads.items()}
            draws = {
                f"draw of {name}{suffix}": step
                for name, head in heads.items()
                for suffix, step in _draws(model, head, count, params).items()
            }
            times = _one_draft(drafts | draws, repeats)
            for name, milliseconds in times.items():
                line = {"rows": count, "way": way, "vocabulary": name, "ms": milliseconds}
                found.append(line)
                base = times[WHOLE if name in drafts else f"draw of {WHOLE}"]
                print(
                    f"{count:2} rows, {way:7}, {name:24}: {milliseconds:7.3f} ms, "
                    f"{milliseconds / base:.2f} of the whole one",
                    flush=True,
                )
        mx.clear_cache()
    return found


Step = Callable[[int], list[mx.array]]
"""From a number of drafts to what must be evaluated to make them."""


def _draft(model: LoadedModel, head: DraftHead | None, rows: int, params: SamplingParams) -> Step:
    """Drafts by the drafter itself, at position 512."""
    drafter = MTPDrafter(model, head)
    cache = model.make_cache(rows)
    state = drafter.make_state(cache)
    sampler = Sampler([params] * rows, [[0]] * rows, model.vocab_size)
    hidden_size = model.causal_lm.args.hidden_size
    dtype = model.causal_lm.model.norm.weight.dtype
    hidden = mx.random.normal((rows, hidden_size), key=mx.random.key(0)).astype(dtype)
    targets, ones = mx.full((rows,), 17, dtype=mx.int32), mx.ones(rows, dtype=mx.int32)

    def step(count: int) -> list[mx.array]:
        cache.reserve([513 + count] * rows)
        packing = Packing(cache.layout, 512 * ones, [1] * rows)
        window = Computed(hidden, targets, slice(None), packing, cache)
        drafts = drafter.propose(state, window, [count] * rows, sampler)
        return [drafts, *state.arrays(), *cache.arrays()]

    return step


def _draws(
    model: LoadedModel, head: DraftHead | None, rows: int, params: SamplingParams
) -> dict[str, Step]:
    """The draw alone; of few tokens also the slow way, scattered among all of them."""
    vocab_size = model.vocab_size
    ids = None if head is None else head.ids
    size = vocab_size if ids is None else ids.size
    sampler = Sampler([params] * rows, [[0]] * rows, vocab_size)
    logits = mx.random.normal((rows, 1, size), key=mx.random.key(1)).astype(mx.bfloat16)
    before = mx.zeros((rows, 1), dtype=mx.int32)
    mx.eval(logits)

    def drawn(count: int) -> list[mx.array]:
        return [sampler.draw(logits, before + p, before, ids=ids) for p in range(count)]

    def scattered(count: int) -> list[mx.array]:
        tokens = []
        for position in range(count):
            wide = mx.full((rows, 1, vocab_size), -mx.inf, dtype=mx.float32)
            wide[..., ids] = logits.astype(mx.float32)
            tokens.append(sampler.draw(wide, before + position, before))
        return tokens

    return {"": drawn} if ids is None else {"": drawn, ", scattered": scattered}


def _one_draft(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Milliseconds of one: what many take more than one does, medians of the repeats."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            taken = []
            for count in (1, _MANY):
                began = time.perf_counter()
                mx.eval(step(count))
                taken.append(time.perf_counter() - began)
            if repeat:
                times[name].append(1e3 * (taken[1] - taken[0]) / (_MANY - 1))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Parse the command line, measure, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=[*SHAPES], help="measure a draft's cost on a GPU")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="with --shape")
    parser.add_argument("--sizes", type=integers, help="of the vocabularies, beside the whole one")
    parser.add_argument("--rows", type=integers, help="rows at once")
    parser.add_argument("--depth", type=int, default=3, help="drafts a step of the bundled model")
    parser.add_argument("--rounds", type=int, default=5, help="with --shape: repeats")
    parser.add_argument("--max-tokens", type=int, default=128, help="of the bundled model")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    check_writable(options.json)
    on_gpu = mx.default_device() == mx.gpu
    if options.shape and not on_gpu:
        sys.exit("--shape needs a GPU; without it the bundled model is measured.")
    options.rows = options.rows or ([1, 4, 16, 32] if options.shape else [1, 4])
    if options.shape:
        options.sizes = options.sizes or [8192, 16384, 32768, 65536]
        config = SHAPES[options.shape]
        found = measure_shape(config, options.bits, options.rows, options.sizes, options.rounds)
    else:
        options.sizes = options.sizes or [256, 512, 1024, 2048]
        found = measure_bundled(options)
    load = "" if on_gpu else f", load {os.getloadavg()[0]:.1f}"
    print(f"\n{options.shape or 'bundled model'}; {platform.platform()}, {BACKEND}{load}")
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
