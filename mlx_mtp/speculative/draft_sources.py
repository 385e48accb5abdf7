"""Where drafts come from: what a source must do, and the list of sources.

A new source is one module, with a `DraftProposer` and a factory, and one line in `SOURCES`.
`EngineConfig.draft_source` names the one in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import mlx.core as mx

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.errors import UsageError
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.sampler import TokenSampler
from mlx_mtp.speculative.proposer import make_mtp_proposer


class DraftState(Protocol):
    """What a proposer keeps for the B rows of one batch."""

    def select(self, rows: mx.array) -> Self:
        """State of these rows alone, int32 [B'], in the order given; this one stays valid."""

    def extend(self, other: Self) -> None:
        """Append the other's rows."""

    def prefix_kv(self) -> RaggedKVCache | None:
        """KV that a cached prefix must hold besides the trunk's; None if there is none.

        Its row p belongs to the hidden state at p and the token at p+1 (`cache/prefix_state.py`).
        That of a new state is empty and may be loaded.
        """

    def arrays(self) -> list[mx.array]:
        """What must be evaluated with a step."""


class DraftProposer(Protocol):
    """A source of drafts. Nothing in it may wait for the device.

    A draft changes no token: it is only accepted if it equals the token that the model draws. So a
    source may propose anything, and is as good as the share of its drafts that are accepted.
    """

    def make_state(
        self, request_ids: Sequence[str], prompts: Sequence[Sequence[int]]
    ) -> DraftState:
        """State for B new rows, given the id and the prompt's token ids of each."""

    def propose(
        self,
        state: Any,
        *,
        hidden: mx.array,
        targets: mx.array,
        start: mx.array,
        num_kept: mx.array,
        num_draft_tokens: int,
        limit: int,
        sampler: TokenSampler,
    ) -> mx.array:
        """Update the state from a window that was just computed, and draft what follows it.

        Called after every prefill chunk and every verify window, in order. With a prefix from the
        cache, the first window begins at the prefix's last position.

        Args:
            state: as `make_state` returned it, for these rows.
            hidden: the trunk's post-norm hidden states of the window, [B, T, H].
            targets: the token after each of the window's positions, int32 [B, T].
            start: absolute position of the window's first token, int32 [B].
            num_kept: how many of the window's positions are valid, int32 [B]; 0 for ended rows. The
                last token of a row is `targets[b, num_kept[b] - 1]`, at position
                `start[b] + num_kept[b]`.
            num_draft_tokens: k, how many to draft; 0 to update the state only.
            limit: a bound of every row's length after the window.
            sampler: draws drafts from logits with the noise that will draw the tokens themselves.

        Returns:
            int32 [B, k], the drafts for the k tokens after each row's last token.
        """


Factory = Callable[[LoadedModel, Sequence[int] | None], DraftProposer | None]
"""Called with the model and `draft_ids`, and returns what `make_proposer` does."""

SOURCES: dict[str, Factory] = {
    "mtp": make_mtp_proposer,
}


def make_proposer(
    name: str, model: LoadedModel, draft_ids: Sequence[int] | None = None
) -> DraftProposer | None:
    """The source `name` for a model; None if the model has nothing to draft with.

    Args:
        name: a key of `SOURCES`.
        model: as it was loaded.
        draft_ids: the only tokens that may be drafted, ascending and in range; None: all.

    Raises:
        UsageError: there is no such source, or it can't be limited to `draft_ids`.
    """
    if name not in SOURCES:
        raise UsageError(f"draft_source is {name!r}; it must be one of {', '.join(SOURCES)}.")
    return SOURCES[name](model, draft_ids)
