"""Does a head draft what its trunk says next? The quick check that a conversion went right."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_tokenizer

from mlx_mtp.errors import ConvertError
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.models.loader import load_model
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.proposer import Computed, MTPProposer

PROMPTS = (
    "Show me a Python function that checks whether a number is prime.",
    "Sort these numbers from largest to smallest: 3, 50, 18, 7",
    "Tell me a short story about a fox and a farmer.",
    "What is the capital of France?",
)
DEPTH = 3
NUM_TOKENS = 64
# Share of drafts that published measurements of Qwen3-Next to 3.8 heads found right, from prose to
# code; and the share at depth 1 below which a head is wrong, whatever the text.
HEALTHY = ((0.45, 0.95), (0.20, 0.90), (0.10, 0.85))
BROKEN = 0.05


class Acceptance(NamedTuple):
    """Over all windows: how many, and the share with the first 1, 2, .. drafts all right."""

    num_windows: int
    rates: tuple[float, ...]


def verify_head(directory: Path) -> Acceptance:
    """Load a model with its head, let it draft over a few prompts, and print how it did.

    Raises:
        ModelError: it can't be loaded, or hardly any draft was right.
    """
    print("Verifying: loading trunk and head ...", flush=True)
    prompts = _prompt_tokens(directory)
    acceptance = measure(load_model(directory, enable_mtp=True), prompts, NUM_TOKENS)
    first = acceptance.rates[0]
    print(f"Drafts accepted, over {acceptance.num_windows} tokens of greedy text:")
    for depth, (rate, (low, high)) in enumerate(zip(acceptance.rates, HEALTHY, strict=True), 1):
        print(f"  depth {depth}: {rate:6.1%}   (healthy heads: {low:.0%} to {high:.0%})")
    if first < BROKEN:
        raise ConvertError(
            f"The head is wrong: {first:.1%} of its first drafts were right, and no working head "
            f"is below {BROKEN:.0%}. Is the source the model that this one was made from, and is "
            "the norms' convention right (--mtp-norms)?"
        )
    if first < HEALTHY[0][0]:
        print(
            "warning: That is less than with healthy heads: check that the source is the original.",
            file=sys.stderr,
        )
    return acceptance


def measure(model: LoadedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> Acceptance:
    """Decode prompts of token ids greedily without drafts, and let the head draft beside it."""
    accepted = []
    for prompt in prompts:
        tokens, drafts = trace(model, prompt, num_tokens)
        # The window at token i drafted tokens i+1, i+2, ...; the last ones reach beyond the text.
        for i in range(len(tokens) - DEPTH):
            right = np.equal(drafts[i], tokens[i + 1 : i + 1 + DEPTH])
            accepted.append(np.logical_and.accumulate(right))
    rates = np.mean(accepted, axis=0) if accepted else np.zeros(DEPTH)
    return Acceptance(len(accepted), tuple(rates.tolist()))


def trace(
    model: LoadedModel, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], list[list[int]]]:
    """Greedy text after a prompt, and what the head drafted after each of its tokens.

    Returns:
        At most `num_tokens` tokens, and for each the `DEPTH` drafts of those that come after it.
    """
    proposer = MTPProposer(model)
    state, cache = proposer.make_state(["verify"]), model.make_cache(1)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    sampler = Sampler([params], [list(prompt)], model.vocab_size)
    window = mx.array([prompt], dtype=mx.int32)
    tokens: list[int] = []
    drafts: list[list[int]] = []
    start = 0
    while len(tokens) < num_tokens:
        length = window.shape[1]
        lengths = mx.array([length], dtype=mx.int32)
        cache.begin(start + length, lengths)
        hidden = model.hidden(window, cache)
        cache.commit(lengths)
        token = mx.argmax(model.logits(hidden[:, -1:]), axis=-1).astype(mx.int32)
        targets = mx.concatenate([window[:, 1:], token], axis=1)
        at = mx.array([start], dtype=mx.int32)
        computed = Computed(hidden, targets, at, num_kept=lengths, limit=start + length)
        proposed = proposer.propose(state, computed, DEPTH, sampler)
        mx.eval(token, proposed, *cache.arrays(), *state.arrays())
        tokens += np.array(token)[0].tolist()
        drafts += np.array(proposed).tolist()
        if tokens[-1] in model.eos_token_ids:
            break
        window, start = token, start + length
    return tokens, drafts


def _prompt_tokens(model: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(model)
    if not tokenizer.has_chat_template:
        return [list(tokenizer.encode(text)) for text in PROMPTS]
    chats = ([{"role": "user", "content": text}] for text in PROMPTS)
    options = {"add_generation_prompt": True, "return_dict": False}
    return [list(tokenizer.apply_chat_template(chat, **options)) for chat in chats]
