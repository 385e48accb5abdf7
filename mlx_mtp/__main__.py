"""`python -m mlx_mtp` is `mlx-mtp`."""

import sys

from mlx_mtp.cli import main

sys.exit(main())
