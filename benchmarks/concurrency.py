"""Tokens per second of this server, MTP off and on, beside mlx_lm.server, over HTTP.

All serve the bundled model in float32 and are asked the same greedy stories by `mlx-mtp bench`'s
own client, in turns. They run at the same time, but only one is asked at a time.

    python -m benchmarks.concurrency [--rounds 3] [--max-tokens 128] [--csv FILE] [--plot FILE.png]
"""

import argparse
import contextlib
import platform
import shutil
import tempfile
from pathlib import Path

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx

from benchmarks.servers import Contender, mlx_lm, ours, running
from mlx_mtp.bench.arguments import add_streams
from mlx_mtp.bench.client import HttpServer
from mlx_mtp.bench.commands import check_files, measure_and_report
from mlx_mtp.bench.measure import Asking
from mlx_mtp.models.hub import BUNDLED_MODEL

OFF = "MTP off"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_streams(parser, (1, 4, 16))
    parser.set_defaults(what="concurrency", prompts="story")
    options = parser.parse_args()
    check_files(options)
    asking = Asking(options.max_tokens, options.temperature, options.ignore_eos)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = []
        for contender in contenders(Path(folder)):
            url = stack.enter_context(running(contender))
            server = HttpServer(url, asking, model=contender.model, name=contender.name)
            servers.append(stack.enter_context(server))
        measure_and_report(
            options,
            servers,
            contenders="server",
            reference=OFF,
            caption=f"\n\n{platform.platform()}, {BACKEND}; tokens per second of all streams "
            "together, median\nof the rounds; in brackets the median ratio to "
            f"{OFF} in the same round.",
        )


def contenders(folder: Path) -> list[Contender]:
    """What is measured, with its files in an empty folder."""
    # What earlier runs measured of step costs would make this one hard to repeat.
    fresh = ("--cache-dir", str(folder / "costs"))
    mtp = [
        ours(name, BUNDLED_MODEL, "--enable-mtp", "--mtp-num-draft-tokens", depth, *fresh)
        for name, depth in (*((f"MTP, k = {k}", str(k)) for k in (1, 2, 3)), ("MTP, auto", "auto"))
    ]
    return [
        mlx_lm(_in_float32(folder / "float32")),
        ours(OFF, BUNDLED_MODEL, "--no-enable-mtp"),
        *mtp,
    ]


def _in_float32(target: Path) -> Path:
    """mlx_lm.server has no --dtype, and mlx has no MoE but in float32 on the CPU."""
    shutil.copytree(BUNDLED_MODEL, target, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    for file in BUNDLED_MODEL.glob("model*.safetensors"):
        tensors = mx.load(str(file))
        assert isinstance(tensors, dict)
        wide = {name: value.astype(mx.float32) for name, value in tensors.items()}
        mx.save_safetensors(str(target / file.name), wide, metadata={"format": "pt"})
    return target


if __name__ == "__main__":
    main()
