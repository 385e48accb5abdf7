"""Answers and acceptance by PyTorch: the figures that any engine is held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from demo_model.acceptance import walk
from demo_model.evaluation import Answered, Backend
from demo_model.held_out import MAX_NEW_TOKENS
from demo_model.network.decoding import Noise, answers, draft_hits
from demo_model.network.model import DemoModel

SEED = 11


def torch_backend(
    model: DemoModel, batch_positions: int, max_new_tokens: int = MAX_NEW_TOKENS
) -> Backend:
    """A backend of a model.

    Args:
        model: on its device; it is set to compute in float32.
        batch_positions: rows times the longest of them that are computed at once.
        max_new_tokens: of an answer.
    """
    model.eval().compute_in(torch.float32)

    def backend(prompts: Sequence[Sequence[int]], temperature: float) -> list[Answered]:
        found: list[Answered | None] = [None] * len(prompts)
        for number, batch in enumerate(_batches(prompts, batch_positions, max_new_tokens)):
            chosen = [prompts[index] for index in batch]
            noise = Noise(temperature, SEED + number)
            said = answers(model, chosen, max_new_tokens, noise)
            hits = draft_hits(model, chosen, said, noise)
            for index, prompt, tokens, hit in zip(batch, chosen, said, hits):
                end = len(prompt) + len(tokens)
                found[index] = Answered(tokens, walk(hit, len(prompt) - 1, end))
        return [each for each in found if each is not None]

    return backend


def _batches(
    prompts: Sequence[Sequence[int]], batch_positions: int, max_new_tokens: int
) -> Iterator[list[int]]:
    """Indices of prompts of like length."""
    batch: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        width = len(prompts[index]) + max_new_tokens
        if batch and width * (len(batch) + 1) > batch_positions:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
