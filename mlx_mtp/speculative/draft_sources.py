"""The sources of drafts by name; `EngineConfig.draft_source` names the one in use.

A new source is one module, with a `DraftProposer` and a factory, and one line in `SOURCES`.
"""

from collections.abc import Callable, Sequence

from mlx_mtp.errors import UsageError
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.speculative.proposer import DraftProposer, make_mtp_proposer

Factory = Callable[[LoadedModel, Sequence[int] | None], DraftProposer | None]
"""Called with the model and `draft_ids`, and returns what `make_proposer` does."""

SOURCES: dict[str, Factory] = {
    "mtp": make_mtp_proposer,
}


def make_proposer(
    name: str, model: LoadedModel, draft_ids: Sequence[int] | None = None
) -> DraftProposer | None:
    """The source `name` for a model; None if the model has nothing to draft with.

    `draft_ids` are the only tokens that may be drafted, ascending and in range; None: all.

    Raises:
        UsageError: there is no such source, or it can't be limited to `draft_ids`.
    """
    if name not in SOURCES:
        raise UsageError(f"draft_source is {name!r}; it must be one of {', '.join(SOURCES)}.")
    return SOURCES[name](model, draft_ids)
