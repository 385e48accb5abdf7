"""The arguments of `mlx-mtp bench`. Nothing heavy is imported here: --help answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_mtp.bench.prompts import KINDS
from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import Flag, Parse, at_least, count_or_path, one_of, text, whole, word_or
from mlx_mtp.options import DRAFT_VOCAB, MODEL_DEFAULT, MODEL_HELP, add_dtype

LEVELS = (1, 2, 4, 8, 16, 32)
COMPARED_LEVELS = (1, 4, 16)
_MOST_AT_ONCE = 4096
_SHORTEST_SILENCE = 0.01
_CALIBRATION_SECONDS = 2.0
_URL_HELP = "the server's address, such as http://127.0.0.1:8000"
API_KEY = Flag("--api-key", "sent as a bearer token", text)
"""The one flag that may come from the environment: a command line can be seen by others."""


def add_bench(subparsers: Any) -> None:
    """Register `bench`; each parsed namespace says in `what` which measurement it is.

    Args:
        subparsers: as argparse's `add_subparsers` returns it.
    """
    bench = subparsers.add_parser(
        "bench",
        help="measure a server with the OpenAI API, or the engine alone",
        description="Measure any server with the OpenAI API, or (offline) the engine alone.",
    )
    what = bench.add_subparsers(dest="what", required=True, metavar="WHAT")
    latency = what.add_parser("latency", help="time to the first token and between tokens")
    latency.add_argument("url", metavar="URL", help=_URL_HELP)
    _add_http(latency)
    latency.add_argument(
        "--prompts",
        type=_list_of(one_of(*KINDS)),
        default=["short", "medium", "long"],
        metavar="KIND,...",
        help=f"lengths of prompts: {', '.join(KINDS)} (default: short,medium,long)",
    )
    _add_asking(latency, rounds=10)
    _add_files(latency)
    streams = what.add_parser("concurrency", help="rates with 1, 2, 4, 8, 16 and 32 streams")
    streams.add_argument("url", metavar="URL", help=_URL_HELP)
    _add_http(streams)
    add_streams(streams, LEVELS)
    compare = what.add_parser("compare", help="two servers in turns, and their ratios")
    compare.add_argument("urls", metavar="URL", nargs=2, help="A and B; the ratios are of B to A")
    _add_http(compare, servers=2)
    add_streams(compare, COMPARED_LEVELS)
    _add_offline(what.add_parser("offline", help="the engine without HTTP, MTP on and off"))


def _add_http(parser: argparse.ArgumentParser, servers: int = 1) -> None:
    twice = "; give it twice if the servers differ" if servers > 1 else ""
    parser.add_argument(
        "--model",
        action="append",
        type=text,
        metavar="NAME",
        help=f"model to ask for (default: the first that the server lists){twice}",
    )
    parser.add_argument(
        API_KEY.name,
        action="append",
        type=text,
        metavar="KEY",
        help=f"{API_KEY.help} (default: {API_KEY.variable}, if set){twice}",
    )
    parser.add_argument(
        "--timeout",
        type=at_least(_SHORTEST_SILENCE),
        default=600.0,
        metavar="SECONDS",
        help="seconds of silence after which a server is given up (default: 600)",
    )


def _add_offline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        type=text,
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: {MODEL_DEFAULT})",
    )
    parser.add_argument(
        "--depths",
        type=_list_of(word_or("auto", whole(1, MAX_DRAFT_TOKENS))),
        default=[1, 2, 3, "auto"],
        metavar="K,K,...",
        help="drafts per step to measure beside MTP off (default: 1,2,3,auto)",
    )
    parser.add_argument(
        DRAFT_VOCAB.name,
        type=count_or_path,
        metavar=DRAFT_VOCAB.metavar,
        help=f"{DRAFT_VOCAB.help} (default: {DRAFT_VOCAB.shown_default})",
    )
    parser.add_argument(
        "--calibration-seconds",
        type=at_least(0.0),
        metavar="SECONDS",
        help=f"most time for auto to measure step costs first (default: {_CALIBRATION_SECONDS:g})",
    )
    add_dtype(parser)
    add_streams(parser, COMPARED_LEVELS)


def settle_offline(options: argparse.Namespace) -> None:
    """Fill in the time to calibrate.

    Raises:
        UsageError: it is given, and no depth needs it.
    """
    if options.calibration_seconds and "auto" not in options.depths:
        raise UsageError("--calibration-seconds is for the depth auto: add it to --depths.")
    if options.calibration_seconds is None:
        options.calibration_seconds = _CALIBRATION_SECONDS


def add_streams(parser: argparse.ArgumentParser, levels: Sequence[int]) -> None:
    """Arguments of a measurement of several streams, its files included.

    Args:
        parser: to add them to.
        levels: numbers of streams, by default.
    """
    shown = ",".join(map(str, levels))
    parser.add_argument(
        "--concurrency",
        type=_list_of(whole(1, _MOST_AT_ONCE)),
        default=list(levels),
        metavar="N,N,...",
        help=f"streams at once (default: {shown})",
    )
    parser.add_argument(
        "--prompts",
        type=one_of(*KINDS),
        default="short",
        metavar="KIND",
        help=f"length of the prompts: {', '.join(KINDS)} (default: short)",
    )
    _add_asking(parser, rounds=3)
    _add_files(parser)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="rate over concurrency (needs matplotlib)"
    )


def _add_asking(parser: argparse.ArgumentParser, rounds: int) -> None:
    for name, parse, default, help_text in (
        ("--max-tokens", whole(2, 1 << 20), 128, "most tokens per answer"),
        ("--rounds", whole(1, 10_000), rounds, "how often to measure each cell of the table"),
        ("--warmups", whole(0, 100), 1, "rounds before them that are not counted"),
        ("--temperature", at_least(0.0), 0.0, "randomness; 0 always takes the most probable token"),
    ):
        parser.add_argument(
            name,
            type=parse,
            default=default,
            metavar="X" if isinstance(default, float) else "N",
            help=f"{help_text} (default: {default:g})",
        )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="make every answer --max-tokens long, if the server supports ignore_eos",
    )
    parser.add_argument(
        "--seed",
        type=whole(0, (1 << 63) - 1),
        metavar="N",
        help="repeat the prompts of another run (default: new ones, which no server has cached)",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the figures as CSV")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")


def _list_of(parse: Parse) -> Parse:
    def parse_all(value: str) -> list[Any]:
        return list(dict.fromkeys(parse(part.strip()) for part in value.split(",")))

    return parse_all
