"""The names that stand for cases in the lists of `expected`."""

import re


def stands_for(name: str, case: str) -> bool:
    """A name stands for a case, for all parameters of a test, or for a whole class or file.

    A star in it stands for any text.
    """
    pattern = ".*".join(map(re.escape, name.split("*")))
    return re.fullmatch(rf"{pattern}(\[.*|::.*)?", case, re.DOTALL) is not None
