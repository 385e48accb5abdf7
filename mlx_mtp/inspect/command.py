"""The commands on models and servers. Heavy imports are deferred until a command runs."""

import argparse
from dataclasses import replace
from datetime import datetime
from typing import Any

from mlx_mtp import backend
from mlx_mtp.console import columns, labelled, say, say_wrapped, size_text, width_of
from mlx_mtp.flags import Flag, add_flags, byte_size, gigabytes, integer, nonempty_text
from mlx_mtp.options import DTYPE, MODEL_FLAG
from mlx_mtp.running import RunningServer, running_servers

_PS_HEADINGS = ("models", "address", "process", "weights of memory limit", "since")
_WIDTH = 120  # columns of a table without a terminal
_PULL = (
    "Download a model with its MTP head, or bring it up to date. A download that was interrupted "
    "goes on. `serve` does it for a model that isn't here."
)
_NAME_HELP = "a hub id such as org/name, or a name such as qwen3.6-35b"


def add_inspect(subparsers: Any) -> None:
    """Register `inspect`, `models`, `pull`, `ls`, `rm` and `ps`."""
    parser = subparsers.add_parser(
        "inspect",
        help="show whether a model fits this machine and whether it has its MTP head",
        description="Show whether a model fits this machine and up to which context, what it is, "
        "whether it has its MTP head, and the next command to type. No weights are downloaded.",
    )
    planned, auto = "plan the memory for computing in this type", "auto, the type serve would use"
    limited = "plan for this much memory, such as 48GB"
    of_ranks = "plan for one of so many machines that serve the model together"
    add_flags(
        parser,
        MODEL_FLAG,
        replace(DTYPE, help=planned, default_text=auto),
        Flag("--memory-limit SIZE", limited, byte_size, default_text="what this machine has"),
        Flag("--ranks N", of_ranks, integer(1, 64), default=1),
    )
    parser.set_defaults(run=run_inspect)
    parser = subparsers.add_parser(
        "models",
        help="list the published models that fit this machine",
        description="List the published models that fit this machine or another Mac: context and "
        "sizes of the downloads. Nothing is downloaded.",
    )
    of_mac = "list what fits a Mac with this much memory, such as 64GB"
    add_flags(parser, Flag("--memory SIZE", of_mac, gigabytes, default_text="this machine's"))
    parser.set_defaults(run=_run_models)
    for name, run, help, more in (
        ("pull", _run_pull, "download a model and its MTP head, or bring it up to date", _PULL),
        ("ls", _run_ls, "list the models on this machine's disk", ""),
        ("rm", _run_rm, "remove a model from this machine's disk", ""),
        ("ps", _run_ps, "list the servers that run on this machine", ""),
    ):
        parser = subparsers.add_parser(name, help=help, description=more or None)
        parser.set_defaults(run=run)
        if name in ("pull", "rm"):
            parser.add_argument("model", metavar="NAME", type=nonempty_text, help=_NAME_HELP)
        if name == "rm":
            parser.add_argument("--yes", action="store_true", help="don't ask")


def run_inspect(options: argparse.Namespace) -> int:
    """Print whether a model fits, and what it is; returns the exit status."""
    backend.prepare()
    from mlx_mtp.inspect.choose import choose_model
    from mlx_mtp.inspect.embeddings import embedding_need
    from mlx_mtp.inspect.found import family, find_model, next_command, quantization
    from mlx_mtp.inspect.memory import fit_rows, memory_demand, memory_rows
    from mlx_mtp.machine import memory_limit

    name, ranks = choose_model(options.model, options.memory_limit), options.ranks
    limit = memory_limit(options.memory_limit)
    if (need := embedding_need(name, options.dtype, None)) is not None:
        fits = need["nbytes"] <= limit.nbytes
        parts = f"weights of {size_text(need['weights'])} and a text of {need['context']:,} tokens"
        rows = {
            "fits": f"{'yes' if fits else 'no'}, in {size_text(limit.nbytes)} ({limit.source})",
            "model": f"{name}, a {need['kind']}, makes embeddings of {need['size']:,} numbers",
            "memory": f"{size_text(need['nbytes'])}: {parts}",
            "next": f"mlx-mtp serve {name}" if fits else "none, as `serve` would refuse it",
        }
        say(labelled(rows, width_of()))
        return 0
    model = find_model(name)
    demand = memory_demand(model, options.dtype, ranks)
    fits = fit_rows(demand, limit)
    num_bytes, num_files = model.trunk
    files = f"{num_files} file{'' if num_files == 1 else 's'}"
    rows = {
        **fits,
        **({"ranks": f"{ranks}; the memory is that of each"} if ranks > 1 else {}),
        "model": model.name,
        "family": family(model),
        "quantization": quantization(model.target.config),
        "weights": f"{size_text(num_bytes)} in {files}" if num_files else "none found",
        "MTP head": model.head or ("none; serve fetches it" if model.head_bytes else "none"),
        **({"vision": f"sees images; tower in {model.tower}"} if model.tower else {}),
        **memory_rows(demand),
        "next": next_command(model, ranks, served=fits["fits"].startswith("yes")),
    }
    say(labelled(rows, width_of()))
    return 0


def _run_models(options: argparse.Namespace) -> int:
    backend.prepare()
    from mlx_mtp.inspect.models import models_text

    say(models_text(options.memory))
    return 0


def _run_pull(options: argparse.Namespace) -> int:
    backend.prepare()
    from mlx_mtp.inspect.disk import pull

    pull(options.model)
    return 0


def _run_ls(_: argparse.Namespace) -> int:
    backend.prepare()
    from mlx_mtp.inspect.disk import listing

    say(listing())
    return 0


def _run_rm(options: argparse.Namespace) -> int:
    backend.prepare()
    from mlx_mtp.inspect.disk import remove

    remove(options.model, asks=not options.yes)
    return 0


def _shown_memory(server: RunningServer) -> str:
    if server.weights is None or server.memory_limit is None:
        return "loaded on demand"
    return f"{size_text(server.weights)} of {size_text(server.memory_limit)}"


def _run_ps(_: argparse.Namespace) -> int:
    servers = running_servers()
    if not servers:
        say_wrapped("No server of yours runs on this machine. `mlx-mtp serve` starts one.")
        return 0
    rows = [
        [
            ", ".join(each.models[: len(each.directories)]),
            each.url,
            str(each.pid),
            _shown_memory(each),
            f"{datetime.fromtimestamp(each.started):%F %H:%M}",
        ]
        for each in servers
    ]
    say(columns(_PS_HEADINGS, rows, 2, width_of() or _WIDTH).strip("\n"))
    return 0
