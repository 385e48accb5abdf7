"""Time and memory of adding a full-size draft head to a model."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks import Row, Rows, row
from benchmarks.timed import drop_cached, medians
from mlx_mtp.convert.target import UNQUANTIZED
from mlx_mtp.models.published import GROUP_SIZE, SHAPES

_CONFIG = SHAPES["Qwen3-Next-80B-A3B-Instruct"]
_SHARD = "model-00041-of-00041.safetensors"
_ROOT = Path(__file__).resolve().parents[1]
_CHUNK = 16 << 20
# A child process starts with its parent's peak RSS, so a small launcher runs between them.
_LAUNCHER = """
import os, subprocess, sys, time
start = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
print(time.perf_counter() - start, usage.ru_maxrss)
sys.exit(status != 0)
"""


def converter(bits: int = 4, cold: bool = False, repeats: int = 3) -> Rows:
    """Time and memory of adding a full-size draft head to a model.

    Writes a head of Qwen3-Next-80B's shape (512 experts, 1.6 G parameters, 3.3 GB of BF16, random
    values) to a temporary folder, and runs the converter on it in a separate process, as a user
    would. The same run also times the converter's parts alone: reading the source, writing as many
    bytes as the result has, and `mx.quantize` of the same tensors. "ratio" is the converter's time
    over their sum.

    Args:
        bits: bits of the converted head; 16 leaves it unquantized
        cold: drop the source from the page cache first
    """
    setting = {"bits": bits, "group_size": GROUP_SIZE, "mode": "affine"}
    config = _CONFIG if bits == UNQUANTIZED else {**_CONFIG, "quantization": setting}
    settle: Callable[[Path], Any] = drop_cached if cold else _read  # equal for all readers
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        _write_source(source)
        for _ in range(repeats):
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            (target / "config.json").write_text(json.dumps(config))
            settle(source / _SHARD)
            seconds, peak = _convert(source, target)
            settle(source / _SHARD)
            times = [_read(source / _SHARD)]
            times += [_write(target / "raw", (target / "mtp.safetensors").stat().st_size)]
            times += [_quantize(source / _SHARD, setting)]
            figures = *times, sum(times), seconds, seconds / sum(times), peak
            names = "read, s | write, s | quantize, s | sum | converter, s | ratio | peak RSS, GB"
            rows.append(row(names, *figures))
            yield rows[-1]
    yield "Medians:"
    yield medians(rows)


def _convert(source: Path, target: Path) -> tuple[float, float]:
    """Returns the script's seconds, Python's start included, and its peak RSS in GB."""
    command = [sys.executable, str(_ROOT / "scripts" / "add_mtp_weights.py")]
    command += ["--mlx-model-path", str(target), "--source-model", str(source)]
    launcher = [sys.executable, "-c", _LAUNCHER, *command]
    launched = subprocess.run(launcher, check=True, capture_output=True, text=True)
    seconds, peak = launched.stdout.split()
    return float(seconds), float(peak) * (1 if sys.platform == "darwin" else 1024) / 1e9


def _read(path: Path) -> float:
    """Returns the seconds to read a file in large pieces."""
    buffer = bytearray(_CHUNK)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def _write(path: Path, size: int) -> float:
    """Returns the seconds to write `size` bytes in large pieces and to fsync them."""
    data = np.random.default_rng(0).integers(0, 256, _CHUNK, dtype=np.uint8).data
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for offset in range(0, size, _CHUNK):
            file.write(data[: min(_CHUNK, size - offset)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def _quantize(path: Path, setting: dict[str, Any]) -> float:
    """Returns the seconds of `mx.quantize` of every matrix; reading them is not counted."""
    total = 0.0
    tensors: Any = mx.load(str(path)) if setting["bits"] != UNQUANTIZED else {}
    with mx.stream(mx.cpu):
        for name in list(tensors):
            matrix = tensors.pop(name)
            if matrix.ndim == 2:
                mx.eval(matrix)
                start = time.perf_counter()
                mx.eval(mx.quantize(matrix, **setting))
                total += time.perf_counter() - start
    return total


def _write_source(path: Path) -> None:
    """Write an HF directory that holds only the head, its tensors in the order of their names."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(_CONFIG))
    shapes = dict(sorted(_shapes().items()))
    index = {"weight_map": dict.fromkeys(shapes, _SHARD)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with (path / _SHARD).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            values = mx.array(random.standard_normal(shape, dtype=np.float32) * np.float32(0.02))
            file.write(np.array(values.astype(mx.bfloat16).view(mx.uint16)).data)
        file.flush()
        os.fsync(file.fileno())


def _shapes() -> dict[str, tuple[int, ...]]:
    size, inner, heads, dim, count = 2048, 512, 16, 256, 512
    norms = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
    norms += ["layers.0.input_layernorm", "layers.0.post_attention_layernorm"]
    layer: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_norm": (dim,) for name in "qk"},
        "self_attn.q_proj": (2 * heads * dim, size),
        **{f"self_attn.{name}_proj": (2 * dim, size) for name in "kv"},
        "self_attn.o_proj": (size, heads * dim),
        "mlp.gate": (count, size),
        "mlp.shared_expert_gate": (1, size),
    }
    for expert in ("shared_expert", *(f"experts.{number}" for number in range(count))):
        layer |= {f"mlp.{expert}.{part}_proj": (inner, size) for part in ("gate", "up")}
        layer[f"mlp.{expert}.down_proj"] = (size, inner)
    shapes = {**dict.fromkeys(norms, (size,)), "fc": (size, 2 * size)}
    shapes |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    return {f"mtp.{name}.weight": shape for name, shape in shapes.items()}
