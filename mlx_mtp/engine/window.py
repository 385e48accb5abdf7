"""A window on its way to the device, and what it brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_mtp.engine.plan import RowResult
from mlx_mtp.engine.prefix import Save
from mlx_mtp.engine.request import TokenLogprobs
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.errors import MlxMtpError, StepError
from mlx_mtp.speculative.acceptance import Verdict


@dataclass(frozen=True)
class Launched:
    """A window on its way.

    Args:
        sequences: its rows.
        num_positions: length of each row's window; in a prefill chunk all of it is kept.
        num_drafts: how many drafts of its window count for each row; empty in a prefill.
        num_proposed: drafts a row that the step proposes for the next window.
        is_prefill: the rows' prompts, not their drafts.
        tokens: int32 [B, T], drawn after each position (the last alone in a prefill).
        verdict: how many of them each row emits.
        logprobs: as `Sampler.logprobs` gives them.
        error: the launch failed and nothing else is valid.
        row_errors: rows that can't go on, by number; the others are valid.
        saves: prefixes that were copied after it.
    """

    sequences: tuple[Sequence, ...]
    num_positions: tuple[int, ...]
    is_prefill: bool = False
    tokens: mx.array | None = None
    verdict: Verdict | None = None
    logprobs: tuple[mx.array, mx.array, mx.array] | None = None
    num_drafts: tuple[int, ...] = ()
    num_proposed: int = 0
    error: StepError | None = None
    row_errors: Mapping[int, MlxMtpError] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)


def row_results(window: Launched) -> list[RowResult]:
    """Wait for a window, and read what it brought for each of its rows."""
    if window.error is not None:
        rows = zip(window.sequences, window.num_positions, strict=True)
        return [RowResult(s, n, error=window.error) for s, n in rows]
    if window.tokens is None or window.verdict is None:
        rows = zip(window.sequences, window.num_positions, strict=True)
        return [RowResult(s, n, n, num_prompt_tokens=n, is_prefill=True) for s, n in rows]
    tokens = np.array(window.tokens)
    num_kept = np.array(window.verdict.num_kept).tolist()
    num_accepted = np.array(window.verdict.num_accepted).tolist()
    finished = np.array(window.verdict.finished).tolist()
    tables = [np.array(a) for a in window.logprobs] if window.logprobs is not None else None
    results = []
    for row, (sequence, length) in enumerate(zip(window.sequences, window.num_positions)):
        kept = num_kept[row]
        top = sequence.request.sampling.top_logprobs
        if row in window.row_errors:
            held = length if window.is_prefill else kept
            results.append(RowResult(sequence, length, held, error=window.row_errors[row]))
            continue
        results.append(
            RowResult(
                sequence,
                length,
                num_kept=length if window.is_prefill else kept,
                token_ids=tuple(tokens[row, :kept].tolist()),
                logprobs=() if tables is None or top is None else _report(tables, row, kept, top),
                finished=finished[row],
                num_prompt_tokens=length if window.is_prefill else 0,
                is_prefill=window.is_prefill,
                num_draft_tokens=0 if window.is_prefill or kept == 0 else window.num_drafts[row],
                num_accepted_tokens=0 if window.is_prefill else num_accepted[row],
            )
        )
    return results


def _report(tables: list[np.ndarray], row: int, kept: int, top: int) -> tuple[TokenLogprobs, ...]:
    chosen, ids, values = tables
    return tuple(
        TokenLogprobs(
            float(chosen[row, j]),
            tuple(zip(ids[row, j, :top].tolist(), values[row, j, :top].tolist())),
        )
        for j in range(kept)
    )
