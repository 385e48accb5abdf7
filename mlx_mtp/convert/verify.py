"""Does a head draft what its trunk says next? The quick check that a conversion went right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_tokenizer

from mlx_mtp.convert.console import Console
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.models.loader import load_model
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.proposer import MTPProposer

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


@dataclass(frozen=True)
class Acceptance:
    """Counts over all windows.

    Args:
        num_windows: how often the head drafted.
        num_accepted: windows whose first d drafts were all right, for d = 1, 2, ...
    """

    num_windows: int
    num_accepted: tuple[int, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of windows whose first d drafts were all right."""
        return tuple(n / max(self.num_windows, 1) for n in self.num_accepted)


def verify(model: Path, console: Console) -> Acceptance:
    """Load a model with its head, let it draft over a few prompts, and tell how it did.

    Raises:
        ConvertError: hardly any draft was right.
        ModelError: it can't be loaded.
    """
    console.say("Verifying: loading trunk and head ...")
    loaded = load_model(model, enable_mtp=True)
    acceptance = measure(loaded, _prompt_tokens(model), NUM_TOKENS)
    console.say(f"Drafts accepted, over {acceptance.num_windows} tokens of greedy text:")
    for depth, (rate, (low, high)) in enumerate(zip(acceptance.rates, HEALTHY, strict=True), 1):
        console.say(f"  depth {depth}: {rate:6.1%}   (healthy heads: {low:.0%} to {high:.0%})")
    if acceptance.rates[0] < BROKEN:
        raise ConvertError(
            f"The head is wrong: {acceptance.rates[0]:.1%} of its first drafts were right, and no "
            f"working head is below {BROKEN:.0%}. Is the source the model that this one was made "
            "from, and is the norms' convention right (--mtp-norms)?"
        )
    if acceptance.rates[0] < HEALTHY[0][0]:
        console.warn("That is less than with healthy heads: check that the source is the original.")
    return acceptance


def measure(model: LoadedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> Acceptance:
    """Decode greedily without drafts, and let the head draft beside it.

    Args:
        model: with its head.
        prompts: token ids.
        num_tokens: most tokens of text per prompt.
    """
    num_windows, num_accepted = 0, [0] * DEPTH
    for prompt in prompts:
        tokens, drafts = trace(model, prompt, num_tokens)
        # The window at token i drafted tokens i+1, i+2, ...; the last ones reach beyond the text.
        for i in range(len(tokens) - DEPTH):
            num_windows += 1
            for depth in range(DEPTH):
                if drafts[i][depth] != tokens[i + 1 + depth]:
                    break
                num_accepted[depth] += 1
    return Acceptance(num_windows, tuple(num_accepted))


def trace(
    model: LoadedModel, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], list[list[int]]]:
    """Greedy text after a prompt, and what the head drafted after each of its tokens.

    Args:
        model: with its head.
        prompt: token ids.
        num_tokens: most tokens of text.

    Returns:
        The tokens, and for each the `DEPTH` drafts of those that come after it.
    """
    proposer = MTPProposer(model)
    state = proposer.make_state(["verify"])
    cache = model.make_cache(1)
    sampler = Sampler(
        [SamplingParams(max_tokens=num_tokens, temperature=0.0)], [list(prompt)], model.vocab_size
    )
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
        logits = model.logits(hidden[:, -1:])
        token = mx.argmax(logits, axis=-1).astype(mx.int32)
        proposed = proposer.propose(
            state,
            hidden=hidden,
            targets=mx.concatenate([window[:, 1:], token], axis=1),
            start=mx.array([start], dtype=mx.int32),
            num_kept=lengths,
            num_draft_tokens=DEPTH,
            limit=start + length,
            sampler=sampler,
        )
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
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        )
        for text in PROMPTS
    ]
