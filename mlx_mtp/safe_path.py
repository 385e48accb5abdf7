"""Where Python modules come from: never from the current directory, which may be a model's."""

import os
import sys


def entries() -> list[str]:
    """The entries of `sys.path` without the current directory, then the folder of this package."""
    try:
        current = os.getcwd()
    except OSError:  # It was deleted.
        current = ""
    # Last, as it is the current directory where somebody works in a clone.
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [*(entry for entry in sys.path if entry not in ("", current)), own]


def drop_current_directory() -> None:
    """Import nothing from the current directory in this process from now on."""
    sys.path[:] = entries()
