"""The program: `mlx-mtp` and `python -m mlx_mtp`."""

from mlx_mtp import safe_path

# Before other imports: `python -m` looks for modules in the current directory first.
safe_path.drop_current_directory()

import sys  # noqa: E402

from mlx_mtp.backend import use_fast_malloc  # noqa: E402

use_fast_malloc()

from mlx_mtp.server.adopted import watch_starter  # noqa: E402

watch_starter()

from mlx_mtp.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
