"""Run a benchmark, or list all: `python -m benchmarks [NAME [--seconds N] [--json FILE]]`.

A scenario is a public function of this package that returns `Rows`. Its parameters are the
command's arguments, and the "Args" part of its docstring is their help. A row is printed as soon as
it is measured; adjacent rows with the same columns form one table.
"""

import argparse
import ast
import importlib
import inspect
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from benchmarks import Row, Rows
from mlx_mtp import backend
from mlx_mtp.bench.report import NOTHING, check_writable, write_json
from mlx_mtp.errors import BenchError, MlxMtpError
from mlx_mtp.flags import hint, print_error

_HELP = {
    "acceptance": "probability that a draft is accepted; random weights accept nothing",
    "bandwidth": "TB/s at which the weights are read once",
    "layers": "number of the model's layers, a multiple of 4; 0 for all",
    "profile": "measure the GPU's time by torch's profiler, which may slow down later rows",
    "seconds": "begin no further case after this time",
    "shape": "name of a published shape, whose weights are random",
    "tiny": "small sizes, to try the command on a CPU",
}


def scenarios() -> dict[str, tuple[str, str]]:
    """Returns the module and the docstring's first line of each scenario; imports no module."""
    return {
        node.name: (path.stem, (ast.get_docstring(node) or "").split("\n")[0])
        for path in Path(__file__).parent.glob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.returns, ast.Name)
        and node.returns.id == "Rows"
    }


def parser_of(name: str, scenario: Callable[..., Rows]) -> argparse.ArgumentParser:
    """Returns the parser of a scenario's arguments, built from its signature and docstring."""
    description, _, listed = (inspect.getdoc(scenario) or "").partition("\nArgs:\n")
    helps = _HELP | dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", listed, re.MULTILINE))
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parameters = inspect.signature(scenario).parameters
    for each in parameters.values():
        kind, default, text = each.annotation, each.default, helps.get(each.name, "")
        options: dict[str, Any] = {"default": default, "type": reader(kind)}
        if get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        flag = f"--{each.name.replace('_', '-')}"
        if each.kind is each.VAR_POSITIONAL:
            parser.add_argument(each.name, nargs="*", help=text)
        elif default is each.empty:
            parser.add_argument(each.name, help=text)
        elif kind is bool:
            action = argparse.BooleanOptionalAction if default else "store_true"
            parser.add_argument(flag, action=action, default=default, help=text)
        else:
            shown = _shown(default) if default not in (None, ()) else ""
            parser.add_argument(flag, help=f"{text} [{shown}]" if shown else text, **options)
    if "seconds" not in parameters:
        parser.add_argument("--seconds", type=float, help="stop at the first row after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows, unrounded")
    return parser


def reader(kind: Any) -> Callable[[str], Any]:
    """Returns a parser of values of type `kind`: "1,2" is a tuple of any length, "1x2" a pair."""
    parts, origin = get_args(kind), get_origin(kind)
    if origin is Literal:
        return type(parts[0])
    if origin is UnionType:
        return reader(parts[0])
    if origin is not tuple:
        return kind
    item, separator = reader(parts[0]), "," if parts[-1] is Ellipsis else "x"
    return lambda text: tuple(item(part) for part in text.split(separator))


def _shown(value: Any, separator: str = ",") -> str:
    parts = value if isinstance(value, tuple) else [value]
    return separator.join(_shown(p, "x") if isinstance(p, tuple) else str(p) for p in parts)


def cell(value: object) -> str:
    """Formats a value for a table: fractions with four digits, large numbers with commas."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < float("inf") else f"{value:.4g}"
    return NOTHING if value is None else f"{value:,}" if type(value) is int else str(value)


def show(row: Row | str, at: float, heads: list[str]) -> None:
    """Print a line of text or a row; `heads`, the current table's header, is updated in place."""
    if isinstance(row, str):
        heads.clear()
        print(f"\n{row}\n", flush=True)
        return
    cells = {head: cell(v) for head, v in row.items() if not head.startswith("_")}
    cells |= {"at, s": f"{at:.0f}"}
    if heads != [*cells]:
        print("\n" * bool(heads), end="")
        heads[:] = cells
        print(f"| {' | '.join(heads)} |\n|{'|'.join('-' * (len(head) + 2) for head in heads)}|")
    padded = (text.rjust(len(head)) for head, text in cells.items())
    print(f"| {' | '.join(padded)} |", flush=True)


def run(name: str, arguments: Sequence[str]) -> None:
    """Run a scenario, print its rows as they come, and write them to --json; raises BenchError."""
    info = backend.prepare()  # Must come before any import of mlx.
    scenario = getattr(importlib.import_module(f"benchmarks.{scenarios()[name][0]}"), name)
    given = vars(parser_of(name, scenario).parse_args(arguments))
    path, shown = given.pop("json"), dict(given)
    check_writable(path)
    parameters = inspect.signature(scenario).parameters
    limit = float("inf") if "seconds" in parameters else given.pop("seconds") or float("inf")
    positional = list[Any]()
    for each in parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            positional += given.pop(each.name)
        elif each.default is each.empty:
            positional.append(given.pop(each.name))
    import mlx.core as mx

    device = mx.device_info().get("device_name", platform.machine())
    machine = f"{device}, {platform.platform()}, {info}; load {os.getloadavg()[0]:.1f}"
    date, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    rows, heads = list[Row | str](), list[str]()
    try:
        for row in scenario(*positional, **given):
            at = time.perf_counter() - began
            show(row, at, heads)
            rows.append(row if isinstance(row, str) else {**row, "at, s": at})
            if at > limit:
                print("The time is over; what is left is not measured.")
                break
    finally:
        print(f"\n{machine}", flush=True)
        if path is not None:
            content = {"scenario": name, "arguments": shown, "began": date, "machine": machine}
            write_json(path, {**content, "rows": rows})


def main(arguments: Sequence[str]) -> int:
    """List the scenarios, or run one; returns the exit status."""
    known = scenarios()
    name, *others = arguments or ["--help"]
    if name not in known and name not in ("-h", "--help"):
        fault = f"There is no benchmark {name!r}{hint(name, known)}"
        print_error(f"{fault} (python -m benchmarks lists all)", "benchmarks")
        return 2
    if name not in known:
        listed = "\n".join(f"{each:18} {line}" for each, (_, line) in sorted(known.items()))
        print(f"{__doc__}\n{listed}")
        return 0
    try:
        run(name, others)
    except MlxMtpError as error:
        print_error(str(error), f"benchmarks {name}")
        return 1 if isinstance(error, BenchError) else 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    backend.use_fast_malloc()
    sys.exit(main(sys.argv[1:]))
