"""The command line. Commands defer heavy imports until mlx's backend is prepared."""

import argparse
import errno
import os
import sys
from collections.abc import Mapping, Sequence

from mlx_mtp import __version__
from mlx_mtp.cli.commands import ADDERS
from mlx_mtp.cli.serve import CLOSED_PIPE_STATUS, discard
from mlx_mtp.errors import BenchError, MlxMtpError, UsageError
from mlx_mtp.flags import CommandParser, print_error

_DESCRIPTION = """\
Serve Qwen3-Next and Qwen3.5+ models with their multi-token-prediction head.

to begin:
  mlx-mtp serve            serve the bundled test model, and the page
  mlx-mtp models           list the published models that fit this machine
  mlx-mtp launch opencode  run an agent on the best of them
"""
_EPILOG = """\
Each flag of serve, generate and chat may also come from an environment
variable (--port: MLX_MTP_PORT), or from ~/.config/mlx-mtp/config.toml: see
mlx-mtp config.
"""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run a command; returns the exit status."""
    # transformers would advise to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    _open_closed_streams()
    parser = _parser()
    given = parser.parse_args(argv)
    if given.command is None:
        parser.print_help()
        return 0
    try:
        if "MLX_RANK" in environ and given.command != "serve":
            raise UsageError(f"mlx.launch is for `mlx-mtp serve`: {given.command} runs alone.")
        if "environ" in given:
            given.environ = environ
        status = int(given.run(given))
        sys.stdout.flush()
        return status
    except MlxMtpError as error:
        print_error(str(error))
        return 1 if isinstance(error, BenchError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        discard(sys.stdout, sys.stderr)
        return CLOSED_PIPE_STATUS
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print_error(f"{error.filename or 'standard output'}: {error.strerror}")
        discard(sys.stdout)
        return 2


def _open_closed_streams() -> None:
    # After `mlx-mtp serve >&-`, sys.stdout is None, and the next file would take its descriptor.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mlx-mtp",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mlx-mtp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add in ADDERS:
        add(commands)
    for action in commands._choices_actions:
        command = commands.choices[action.dest]
        command.description = command.description or f"{action.help}."
    return parser
