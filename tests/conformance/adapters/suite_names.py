"""The names that stand for cases in the lists of `expected`."""

import re


def stands_for(name: str, case: str) -> bool:
    """True if `name` denotes `case`: the case itself, its test, its class or its file.

    A star in `name` matches any text.
    """
    pattern = ".*".join(map(re.escape, name.split("*")))
    return re.fullmatch(rf"{pattern}(\[.*|::.*)?", case, re.DOTALL) is not None
