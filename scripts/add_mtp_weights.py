#!/usr/bin/env python
"""Give an MLX model its MTP head back: `mlx-mtp add-mtp-weights`, run from a checkout.

python scripts/add_mtp_weights.py --mlx-model-path DIR_OR_HUB_ID --source-model Qwen/...
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_mtp.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["add-mtp-weights", *sys.argv[1:]]))
