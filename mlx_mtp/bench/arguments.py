"""The arguments of `bench` and `selftest`. Nothing heavy is imported: --help answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_mtp.bench.prompts import KINDS
from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import Flag, Parse, add_options, at_least, one_of, secret, text, whole, word_or
from mlx_mtp.options import DRAFT_VOCAB, DTYPE, MODEL_FLAG

_MODEL = Flag("--model", "model to ask for", text, "NAME", repeated=True)
API_KEY = Flag("--api-key", "sent as a bearer token", secret, "KEY")
"""The one flag that may come from the environment: a command line can be seen by others."""
_OFTEN = "how often to measure each cell of the table"
_RANDOMNESS = "randomness; 0 always takes the most probable token"
_SEED = Flag("--seed", "repeat the prompts of another run", whole(0, (1 << 63) - 1), "N")
_ASKING = (
    Flag("--warmups", "rounds before them that are not counted", whole(0, 100), "N", default=1),
    Flag("--max-tokens", "most tokens per answer", whole(2, 1 << 20), "N", default=128),
    Flag("--temperature", _RANDOMNESS, at_least(0.0), "X", default=0.0),
    replace(_SEED, default_text="new ones, which no server has cached"),
    Flag("--csv", "write the figures as CSV", Path, metavar="FILE"),
    Flag("--json", "write all that was measured", Path, metavar="FILE"),
)
_LEVELS = (1, 2, 4, 8, 16, 32)
_COMPARED_LEVELS = (1, 4, 16)
_DEPTH = word_or("auto", whole(1, MAX_DRAFT_TOKENS))
_CALIBRATION_SECONDS = 2.0
_CALIBRATION = Flag(
    "--calibration-seconds",
    "most time for auto to measure step costs first",
    at_least(0.0),
    metavar="SECONDS",
    default_text=f"{_CALIBRATION_SECONDS:g}",
)


def add_bench(subparsers: Any) -> None:
    """Register `bench`; each parsed namespace says in `what` which measurement it is."""
    bench = subparsers.add_parser(
        "bench",
        help="measure a server with the OpenAI API, or the engine alone",
        description="Measure any server with the OpenAI API, or (offline) the engine alone.",
    )
    what = bench.add_subparsers(dest="what", required=True, metavar="WHAT")
    address = "the server's address, such as http://127.0.0.1:8000"
    kinds, compared_depths = f"lengths of prompts: {', '.join(KINDS)}", (1, 2, 3, "auto")
    latency = what.add_parser("latency", help="time to the first token and between tokens")
    latency.add_argument("url", metavar="URL", help=address)
    _add_http(latency)
    add_options(latency, _list("--prompts", kinds, one_of(*KINDS), KINDS[1:], "KIND,..."))
    _add_asking(latency, rounds=10)
    streams = what.add_parser("concurrency", help="rates with 1, 2, 4, 8, 16 and 32 streams")
    streams.add_argument("url", metavar="URL", help=address)
    _add_http(streams)
    add_streams(streams, _LEVELS)
    compare = what.add_parser("compare", help="two servers in turns, and their ratios")
    compare.add_argument("urls", metavar="URL", nargs=2, help="A and B; the ratios are of B to A")
    _add_http(compare, "; give it twice if the servers differ")
    add_streams(compare, _COMPARED_LEVELS)
    offline = what.add_parser("offline", help="the engine without HTTP, MTP on and off")
    depths = "drafts per step to measure beside MTP off"
    add_options(offline, MODEL_FLAG, DRAFT_VOCAB, _CALIBRATION, DTYPE)
    add_options(offline, _list("--depths", depths, _DEPTH, compared_depths, "K,K,..."))
    add_streams(offline, _COMPARED_LEVELS)


def add_selftest(subparsers: Any) -> None:
    """Register `selftest`."""
    parser = subparsers.add_parser(
        "selftest",
        help="check this machine in a minute, and print a table for a report",
        description="Check the kernels against the portable code and MTP's output against plain "
        "decoding, measure acceptance and speed, and print one table for a report.",
        epilog="Exit status: 0 all is well, 1 a check failed, 2 it could not be run.",
    )
    seconds = "time to take after loading; what doesn't fit is skipped"
    add_options(
        parser,
        MODEL_FLAG,
        DTYPE,
        Flag("--seconds", seconds, at_least(1.0), "SECONDS", default=60.0),
        Flag("--json", "write everything that was measured", Path, metavar="FILE"),
    )


def settle_offline(options: argparse.Namespace) -> None:
    """Fill in the time to calibrate; raises UsageError if it is given and no depth needs it."""
    if options.calibration_seconds and "auto" not in options.depths:
        raise UsageError("--calibration-seconds is for the depth auto: add it to --depths.")
    if options.calibration_seconds is None:
        options.calibration_seconds = _CALIBRATION_SECONDS


def add_streams(parser: argparse.ArgumentParser, levels: Sequence[int]) -> None:
    """Add what measures several streams; `levels` are the numbers of streams by default."""
    kinds = f"length of the prompts: {', '.join(KINDS)}"
    add_options(
        parser,
        _list("--concurrency", "streams at once", whole(1, 4096), levels, "N,N,..."),
        Flag("--prompts", kinds, one_of(*KINDS), "KIND", default="short"),
        Flag("--plot", "rate over concurrency (needs matplotlib)", Path, metavar="FILE.png"),
    )
    _add_asking(parser, rounds=3)


def _add_http(parser: argparse.ArgumentParser, twice: str = "") -> None:
    first, variable = "the first that the server lists", f"{API_KEY.variable}, if set"
    silence = "seconds of silence after which a server is given up"
    add_options(
        parser,
        replace(_MODEL, help=_MODEL.help + twice, default_text=first),
        replace(API_KEY, help=API_KEY.help + twice, repeated=True, default_text=variable),
        Flag("--timeout", silence, at_least(0.01), "SECONDS", default=600.0),
    )


def _add_asking(parser: argparse.ArgumentParser, rounds: int) -> None:
    add_options(parser, Flag("--rounds", _OFTEN, whole(1, 10_000), "N", default=rounds), *_ASKING)
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="make every answer --max-tokens long, if the server supports ignore_eos",
    )


def _list(name: str, help_text: str, parse: Parse, default: Sequence[Any], metavar: str) -> Flag:
    """A flag of several values separated by commas."""

    def parse_all(value: str) -> list[Any]:
        return list(dict.fromkeys(parse(part.strip()) for part in value.split(",")))

    shown = ",".join(map(str, default))
    return Flag(name, help_text, parse_all, metavar, default=list(default), default_text=shown)
