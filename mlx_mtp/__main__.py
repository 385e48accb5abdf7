"""The program: `mlx-mtp` and `python -m mlx_mtp`."""

from mlx_mtp import safe_path

# Before other imports: `python -m` looks for modules in the current directory first.
safe_path.drop_current_directory()

import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from mlx_mtp.backend import use_fast_malloc  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status; `arguments` are the program's by default."""
    if arguments is None:  # Else the arguments are not those that this process began with.
        use_fast_malloc()
    from mlx_mtp.server.adopted import watch_starter

    watch_starter()
    from mlx_mtp.cli.main import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
