"""The flags of `mlx-mtp serve`, and the choice of one model here or models in processes."""

import argparse
from typing import Any

from mlx_mtp.cli.model_flags import wants_router
from mlx_mtp.cli.serve import serve
from mlx_mtp.cli.serve_models import run_router
from mlx_mtp.options import SERVE_FLAGS
from mlx_mtp.settings import add_settings, resolve


def add_serve(commands: Any) -> None:
    """Register `serve`."""
    parser = commands.add_parser("serve", help="serve models with the OpenAI API")
    add_settings(parser, *SERVE_FLAGS)
    parser.set_defaults(run=_serve, environ=None)


def _serve(given: argparse.Namespace) -> int:
    options = resolve(given, SERVE_FLAGS, given.environ)
    return run_router(given) if wants_router(options) else serve(options)
