"""A reduced draft vocabulary: the only tokens that may be drafted. No arrays here."""

from collections.abc import Iterable

from mlx_mtp.errors import UsageError


def check_ids(ids: Iterable[int], vocab_size: int, source: str) -> tuple[int, ...]:
    """Ids in ascending order; UsageError, which names `source`, if they are not a vocabulary."""
    found: set[int] = set()
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UsageError(
                f"{source} names token {token!r}, but this model's token ids are 0 to "
                f"{vocab_size - 1}."
            )
        if token in found:
            raise UsageError(f"{source} names token {token} twice; each may occur once.")
        found.add(token)
    if not found:
        raise UsageError(f"{source} names no token; it must name at least one.")
    return tuple(sorted(found))
