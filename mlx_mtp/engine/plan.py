"""What the scheduler and the runner tell each other: a step to launch, and what it brought."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_mtp.engine.request import TokenLogprobs
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.errors import MlxMtpError


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A piece of the prompts of one group.

    Args:
        group: which group of prompts, unique.
        rows: (sequence, first position, number of tokens) each.
    """

    group: int
    rows: tuple[tuple[Sequence, int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what to launch, and which rows are still wanted.

    Args:
        chunk: a prefill chunk, or None.
        decode: the rows to decode, or empty.
        num_draft_tokens: drafts to propose for the next window.
        live: every unfinished sequence; state of any other row may be dropped.
    """

    chunk: PrefillChunk | None
    decode: tuple[Sequence, ...]
    num_draft_tokens: int
    live: frozenset[Sequence]

    @property
    def empty(self) -> bool:
        """There is nothing to launch."""
        return self.chunk is None and not self.decode

    @property
    def needs_host(self) -> bool:
        """Its tokens must be read before the next step is launched."""
        return any(s.needs_host for s in self.decode)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row's window brought, read from the device.

    Args:
        sequence: the row.
        num_positions: length of the window.
        num_kept: how much of it stays in the caches.
        token_ids: tokens emitted.
        logprobs: one per token if asked for.
        finished: the device ended the row.
        num_prompt_tokens: prompt tokens this window computed.
        is_prefill: the window was of the prompt; with all of the prompt cached it has no position.
        num_draft_tokens, num_accepted_tokens: of this window, as far as the row wanted drafts.
        error: the step failed; nothing else is valid.
    """

    sequence: Sequence
    num_positions: int
    num_kept: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: bool = False
    num_prompt_tokens: int = 0
    is_prefill: bool = False
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: MlxMtpError | None = None
