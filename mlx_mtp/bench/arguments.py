"""The arguments of `bench`. Heavy imports are deferred, so --help is fast."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_mtp.bench.prompts import KINDS
from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.flags import (
    Flag,
    Parse,
    add_flags,
    at_least,
    integer,
    nonempty_text,
    secret,
    word_of,
    word_or,
)
from mlx_mtp.options import DRAFT_VOCAB, DTYPE, EXACT, MODEL_FLAG, RANDOMNESS

_MODEL = Flag("--model NAME", "model to ask for", nonempty_text, repeated=True)
# A variable or the settings file can also set the key, as other users can see a command line.
_API_KEY = Flag("--api-key KEY", "sent as a bearer token", secret)
_SEED = Flag("--seed N", "repeat the prompts of another run", integer(0, (1 << 63) - 1))
_ASKING = (
    Flag("--warmups N", "rounds before them that are not counted", integer(0, 100), default=1),
    Flag("--max-tokens N", "most tokens per answer", integer(2, 1 << 20), default=128),
    Flag("--temperature X", RANDOMNESS, at_least(0.0), default=0.0),
    replace(_SEED, default_text="new ones, which no server has cached"),
    Flag("--csv FILE", "write the figures as CSV", Path),
    Flag("--json FILE", "write all that was measured", Path),
)
_COMPARED_LEVELS = (1, 4, 16)
CALIBRATION_SECONDS = 30.0
_CALIBRATION = Flag(
    "--calibration-seconds SECONDS",
    "most time for auto to measure step costs first",
    at_least(0.0),
    default_text=f"{CALIBRATION_SECONDS:g}",
)


def add_bench(subparsers: Any) -> None:
    """Register `bench`; `what` in the parsed namespace is the measurement."""
    bench = subparsers.add_parser(
        "bench",
        help="measure a server with the OpenAI API, or the engine alone",
        description="Measure any server with the OpenAI API, or (offline) the engine alone.",
    )
    bench.set_defaults(run=_run_bench, environ=None)
    what = bench.add_subparsers(dest="what", required=True, metavar="WHAT")
    address = "the server's address, such as http://127.0.0.1:8000"
    kinds = f"lengths of prompts: {', '.join(KINDS)}"
    latency = what.add_parser("latency", help="time to the first token and between tokens")
    latency.add_argument("url", metavar="URL", help=address)
    _add_http(latency)
    add_flags(latency, _list("--prompts KIND,...", kinds, word_of(*KINDS), KINDS[1:]))
    _add_asking(latency, rounds=10)
    streams = what.add_parser("concurrency", help="rates with 1, 2, 4, 8, 16 and 32 streams")
    streams.add_argument("url", metavar="URL", help=address)
    _add_http(streams)
    _add_streams(streams, (1, 2, 4, 8, 16, 32))
    compare = what.add_parser("compare", help="two servers in turns, and their ratios")
    compare.add_argument("urls", metavar="URL", nargs=2, help="A and B; the ratios are of B to A")
    _add_http(compare, "; give it twice if the servers differ")
    _add_streams(compare, _COMPARED_LEVELS)
    offline = what.add_parser("offline", help="the engine without HTTP, MTP on and off")
    depth, depths = word_or("auto", integer(1, MAX_DRAFT_TOKENS)), (1, 2, 3, "auto")
    add_flags(offline, MODEL_FLAG, DRAFT_VOCAB, _CALIBRATION, DTYPE, EXACT)
    help_text = "drafts per step to measure beside MTP off"
    add_flags(offline, _list("--depths K,K,...", help_text, depth, depths))
    _add_streams(offline, _COMPARED_LEVELS)


def _add_streams(parser: argparse.ArgumentParser, levels: Sequence[int]) -> None:
    """Add the flags for several streams; `levels` are the default numbers of streams."""
    kinds = f"length of the prompts: {', '.join(KINDS)}"
    add_flags(
        parser,
        _list("--concurrency N,N,...", "streams at once", integer(1, 4096), levels),
        Flag("--prompts KIND", kinds, word_of(*KINDS), default="short"),
        Flag("--plot FILE.png", "rate over concurrency (needs matplotlib)", Path),
    )
    _add_asking(parser, rounds=3)


def _run_bench(options: argparse.Namespace) -> int:
    from mlx_mtp.bench.commands import run_http, run_offline

    return run_offline(options) if options.what == "offline" else run_http(options)


def _add_http(parser: argparse.ArgumentParser, twice: str = "") -> None:
    first, variable = "the first that the server lists", f"{_API_KEY.variable}, if set"
    silence = "seconds of silence after which a server is given up"
    add_flags(
        parser,
        replace(_MODEL, help=_MODEL.help + twice, default_text=first),
        replace(_API_KEY, help=_API_KEY.help + twice, repeated=True, default_text=variable),
        Flag("--timeout SECONDS", silence, at_least(0.01), default=600.0),
    )


def _add_asking(parser: argparse.ArgumentParser, rounds: int) -> None:
    often = "how often to measure each cell of the table"
    add_flags(parser, Flag("--rounds N", often, integer(1, 10_000), default=rounds), *_ASKING)
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="make every answer --max-tokens long, if the server supports ignore_eos",
    )


def _list(usage: str, help_text: str, parse: Parse, default: Sequence[Any]) -> Flag:
    """Returns a flag whose value is a comma-separated list without duplicates."""

    def parse_all(value: str) -> list[Any]:
        return list(dict.fromkeys(parse(part.strip()) for part in value.split(",")))

    shown = ",".join(map(str, default))
    return Flag(usage, help_text, parse_all, default=list(default), default_text=shown)
