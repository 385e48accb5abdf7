"""The sources of drafts by name; a new one is a module with a factory, and a line in `SOURCES`."""

from collections.abc import Callable, Sequence

from mlx_mtp.errors import UsageError
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.speculative.drafter import DraftProposer, make_mtp_proposer

Factory = Callable[[LoadedModel, Sequence[int] | None], DraftProposer | None]

SOURCES: dict[str, Factory] = {
    "mtp": make_mtp_proposer,
}


def make_proposer(
    name: str, model: LoadedModel, draft_ids: Sequence[int] | None = None
) -> DraftProposer | None:
    """The source `name`, limited to `draft_ids`; None if the model has nothing to draft with."""
    if name not in SOURCES:
        raise UsageError(f"draft_source is {name!r}; it must be one of {', '.join(SOURCES)}.")
    return SOURCES[name](model, draft_ids)
