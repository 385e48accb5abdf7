"""Keeps Python from importing from the current directory, which can be an untrusted model's."""

import os
import sys

# `python -m` puts the current directory first in the path, and PYTHONPATH can't hold directories
# with a colon in their names.
_BOOT = """if True:
    import importlib.util, json, runpy, sys
    init, sys.path[:] = json.loads(sys.argv.pop(1))
    spec = importlib.util.spec_from_file_location("mlx_mtp", init)
    sys.modules["mlx_mtp"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def drop_current_directory() -> None:
    """Import nothing from the current directory from now on, also in child Python processes."""
    sys.path[:] = _entries()
    # For processes that libraries start, such as multiprocessing's on a Mac.
    os.environ["PYTHONSAFEPATH"] = "1"


def command_of(module: str) -> list[str]:
    """Returns the command that runs a module of this package with this process's `sys.path`.

    Start the command in another directory, as Python's `site` can import from the current one.
    """
    import json  # Not before the current directory has been dropped.

    init = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__init__.py")
    return [sys.executable, "-P", "-c", _BOOT, json.dumps([init, _entries()]), module]


def _entries() -> list[str]:
    try:
        current = os.getcwd()
    except OSError:  # It was deleted.
        current = ""
    pythons = {os.path.dirname(os.__file__)}
    if site := sys.modules.get("site"):  # Python imports it at its start, if at all.
        pythons.update(site.getsitepackages())
    return [e for e in sys.path if os.path.isabs(e) and (e != current or e in pythons)]
