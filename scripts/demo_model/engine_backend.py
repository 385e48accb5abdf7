"""The same by this project's engine, in batches, with real windows."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path

from demo_model.acceptance import DEPTH, Windows
from demo_model.evaluation import Answered, Backend
from demo_model.held_out import MAX_NEW_TOKENS
from demo_model.tokenizer import END_ID, VOCAB_SIZE
from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.models.loader import load_model
from mlx_mtp.sampling.params import SamplingParams

_PATIENCE = 900.0
"""Seconds without an output after which the engine is taken to have failed."""


def engine_backend(
    directory: Path, max_num_seqs: int, max_new_tokens: int = MAX_NEW_TOKENS
) -> tuple[Backend, Engine]:
    """A backend of a checkpoint, and its engine, which the caller stops.

    Args:
        directory: of the checkpoint.
        max_num_seqs: rows at once.
        max_new_tokens: of an answer.
    """
    config = EngineConfig(num_draft_tokens=DEPTH, max_num_seqs=max_num_seqs)
    engine = build_engine(load_model(directory, enable_mtp=True), config, VOCAB_SIZE, (END_ID,))
    outputs: queue.SimpleQueue[Sequence[RequestOutput]] = queue.SimpleQueue()
    engine.start(outputs.put)

    def backend(prompts: Sequence[Sequence[int]], temperature: float) -> list[Answered]:
        found = [Answered([], Windows()) for _ in prompts]
        for index, prompt in enumerate(prompts):
            sampling = SamplingParams(
                max_tokens=max_new_tokens, temperature=temperature, seed=index
            )
            engine.submit(Request(str(index), tuple(prompt), sampling))
        unfinished = len(prompts)
        while unfinished:
            for output in outputs.get(timeout=_PATIENCE):
                unfinished -= _take(output, found[int(output.request_id)])
        return found

    return backend, engine


def _take(output: RequestOutput, answer: Answered) -> bool:
    """Note a step's output; whether it was the answer's last."""
    if output.error is not None:
        raise output.error
    answer.tokens.extend(output.token_ids)
    if output.num_draft_tokens:
        answer.windows.observe(output.num_accepted_tokens, len(output.token_ids))
    return output.finish_reason is not None
