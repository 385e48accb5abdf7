"""What is told of each HTTP request when it has ended."""

from dataclasses import dataclass, field

from starlette.types import Scope

_RECORD = "mlx_mtp.record"


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, as far as it has come; its handlers add what they know."""

    ignored: list[str] = field(default_factory=list)  # parameters without effect, as in the body


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request that this scope is of."""
    record: RequestRecord = scope.setdefault(_RECORD, RequestRecord())
    return record
