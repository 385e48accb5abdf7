"""A quick check of a conversion: the share of the head's drafts that its trunk accepts."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_lm.utils import load_tokenizer

from mlx_mtp.build import build_engine, run_requests
from mlx_mtp.config import EngineConfig
from mlx_mtp.console import say_wrapped
from mlx_mtp.engine.request import Request
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams

PROMPTS = (
    "Show me a Python function that checks whether a number is prime.",
    "Sort these numbers from largest to smallest: 3, 50, 18, 7",
    "Tell me a short story about a fox and a farmer.",
    "What is the capital of France?",
)
DEPTH = 3
NUM_TOKENS = 64
# Published acceptance rates by depth (prose, code), and the rate below which a head is wrong.
HEALTHY = ((0.45, 0.95), (0.20, 0.90), (0.10, 0.85))
BROKEN = 0.05


def verify_head(directory: Path) -> tuple[int, list[float]]:
    """Load a model, measure its head and print the result.

    Returns what `measure_head` returns. Raises ConvertError for a wrong head.
    """
    say_wrapped("Verifying: loading trunk and head ...")
    prompts = _prompt_tokens(directory)
    num_steps, rates = measure_head(load_model(directory, enable_mtp=True), prompts)
    say_wrapped(f"Drafts accepted, over {num_steps} steps of greedy text:")
    for depth, (rate, (low, high)) in enumerate(zip(rates, HEALTHY, strict=True), 1):
        say_wrapped(f"  depth {depth}: {rate:6.1%}   (healthy heads: {low:.0%} to {high:.0%})")
    if rates[0] < BROKEN:
        raise ConvertError(
            f"The head is wrong: {rates[0]:.1%} of its first drafts were right, and no working "
            f"head is below {BROKEN:.0%}. Is the source the model that this one was made from, "
            "and is the norms' convention right (--mtp-norms)?"
        )
    if rates[0] < HEALTHY[0][0]:
        say_wrapped(
            "warning: That is less than with healthy heads: check that the source is the original.",
            file=sys.stderr,
        )
    return num_steps, rates


def measure_head(model: LoadedModel, prompts: Sequence[Sequence[int]]) -> tuple[int, list[float]]:
    """Decode greedily; returns the number of steps, and the share of steps that accepted draft n.

    The shares are in the order n = 1, 2, .. `DEPTH`.
    """
    config = EngineConfig(num_draft_tokens=DEPTH, max_num_seqs=len(prompts))
    engine = build_engine(model, config, model.vocab_size, ())
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0)
    requests = [Request(f"verify-{n}", tuple(p), sampling) for n, p in enumerate(prompts)]
    try:
        list(run_requests(engine, requests))
    finally:
        engine.stop()
    stats = engine.stats()
    accepted = [*stats.num_accepted_tokens_per_pos.get("mtp", ()), *[0] * DEPTH][:DEPTH]
    return stats.num_draft_windows, [count / max(1, stats.num_draft_windows) for count in accepted]


def _prompt_tokens(model: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(model)
    if not tokenizer.has_chat_template:
        return [list(tokenizer.encode(text)) for text in PROMPTS]
    chats = ([{"role": "user", "content": text}] for text in PROMPTS)
    options = {"add_generation_prompt": True, "return_dict": False}
    return [list(tokenizer.apply_chat_template(chat, **options)) for chat in chats]
