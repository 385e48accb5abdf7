"""Time and memory of adding a full-scale head: `python -m benchmarks.converter`.

Writes a head of Qwen3-Next-80B's shape (512 experts, 1.6 G parameters, 3.3 GB of BF16, random
values) under --dir, and converts it as a user would, in a process of its own. Beside that, in the
same run: what reading the source, writing as many bytes as the result and the bare `mx.quantize`
of the same tensors take.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mlx_mtp import backend

backend.prepare()

import mlx.core as mx
import numpy as np

from mlx_mtp.convert.target import MODES, UNQUANTIZED

CONFIG = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262144,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
}
SHARD = "model-00041-of-00041.safetensors"
ROOT = Path(__file__).resolve().parents[1]
_CHUNK = 16 << 20
# A process begins with the peak of the one that started it, so a small one stands between.
_LAUNCHER = """
import os, subprocess, sys, time
start = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
print(time.perf_counter() - start, usage.ru_maxrss)
sys.exit(status != 0)
"""


def main() -> int:
    """Measure, print a table, and clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("/tmp/mlx-mtp-converter-benchmark"))
    parser.add_argument("--bits", type=int, default=4, help="16 leaves the head unquantized")
    parser.add_argument("--mode", default="affine")
    parser.add_argument("--group-size", type=int, default=None)
    parser.add_argument("--fp8", action="store_true", help="a source in block-scaled FP8")
    parser.add_argument("--stacked", action="store_true", help="a source with stacked experts")
    parser.add_argument("--cold", action="store_true", help="with the source out of the page cache")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="leave the source for another run")
    options = parser.parse_args()
    source = options.dir / f"source{'-fp8' * options.fp8}{'-stacked' * options.stacked}"
    if not (source / SHARD).exists():
        print("Writing the source ...", flush=True)
        write_source(source, fp8=options.fp8, stacked=options.stacked)
    try:
        measure(source, options)
    finally:
        if not options.keep:
            shutil.rmtree(options.dir)
    return 0


def measure(source: Path, options: argparse.Namespace) -> None:
    """Print one row of the table per repeat, and the medians."""
    group_size = options.group_size or MODES[options.mode][1][0]
    setting = {"bits": options.bits, "group_size": group_size, "mode": options.mode}
    print(f"{options.bits} bits, groups of {group_size}, {options.mode}; load {os.getloadavg()[0]}")
    print("| read | write | quantize | sum | converter | ratio | peak RSS |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for _ in range(options.repeats):
        target = options.dir / "target"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        quantization = {} if options.bits == UNQUANTIZED else {"quantization": setting}
        (target / "config.json").write_text(json.dumps({**CONFIG, **quantization}))
        _settle(source, options.cold)
        seconds, peak = convert(source, target)
        size = (target / "mtp.safetensors").stat().st_size
        _settle(source, options.cold)
        read = read_alone(source / SHARD)
        write = write_alone(options.dir / "raw", size)
        quantize = quantize_alone(source / SHARD, setting)
        alone = read + write + quantize
        rows.append((read, write, quantize, alone, seconds, seconds / alone, peak))
        print(_row(rows[-1]), flush=True)
    print(_row([statistics.median(column) for column in zip(*rows)]), "(medians)")


def convert(source: Path, target: Path) -> tuple[float, float]:
    """Seconds and peak resident gigabytes of the script, start of Python included."""
    command = [sys.executable, str(ROOT / "scripts" / "add_mtp_weights.py")]
    command += ["--mlx-model-path", str(target), "--source-model", str(source)]
    launcher = [sys.executable, "-c", _LAUNCHER, *command]
    launched = subprocess.run(launcher, check=True, capture_output=True, text=True)
    seconds, peak = launched.stdout.split()
    return float(seconds), float(peak) * (1 if sys.platform == "darwin" else 1024) / 1e9


def read_alone(path: Path) -> float:
    """Seconds to read a file in large pieces."""
    buffer = bytearray(_CHUNK)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def write_alone(path: Path, size: int) -> float:
    """Seconds to write so many bytes in large pieces, and to bring them to the disk."""
    data = np.random.default_rng(0).integers(0, 256, _CHUNK, dtype=np.uint8).data
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for offset in range(0, size, _CHUNK):
            file.write(data[: min(_CHUNK, size - offset)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def quantize_alone(path: Path, setting: dict[str, Any]) -> float:
    """Seconds in `mx.quantize` of every matrix; reading them (and FP8's decoding) isn't counted."""
    total = 0.0
    tensors: Any = mx.load(str(path)) if setting["bits"] != UNQUANTIZED else {}
    with mx.stream(mx.cpu):
        for name in list(tensors):
            value = tensors.pop(name)
            if value.ndim < 2 or name.endswith("_scale_inv"):
                continue
            is_fp8 = value.dtype == mx.uint8
            matrix = mx.from_fp8(value, dtype=mx.bfloat16) if is_fp8 else value
            mx.eval(matrix)
            start = time.perf_counter()
            mx.eval(mx.quantize(matrix, **setting))
            total += time.perf_counter() - start
    return total


def write_source(path: Path, *, fp8: bool, stacked: bool) -> None:
    """An HF directory with the head alone, its tensors in the order of their names."""
    path.mkdir(parents=True, exist_ok=True)
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**CONFIG, "quantization_config": quantized} if fp8 else CONFIG
    (path / "config.json").write_text(json.dumps(config))
    tensors = dict(sorted(_tensors(fp8, stacked).items()))
    index = {"weight_map": dict.fromkeys(tensors, SHARD)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + int(np.prod(shape)) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with (path / SHARD).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dtype, shape in tensors.values():
            for _ in range(shape[0] if len(shape) == 3 else 1):
                values = random.standard_normal(shape[-2:], dtype=np.float32) * np.float32(0.02)
                as_bf16 = mx.array(values).astype(mx.bfloat16).view(mx.uint16)
                stored = mx.to_fp8(mx.array(values * 1000)) if dtype != "BF16" else as_bf16
                file.write(np.array(stored).data)
        file.flush()
        os.fsync(file.fileno())


def _tensors(fp8: bool, stacked: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each."""
    size, inner, heads, dim, count = 2048, 512, 16, 256, 512
    vectors = {f"pre_fc_norm_{name}.weight": size for name in ("embedding", "hidden")}
    vectors |= {"norm.weight": size, "layers.0.input_layernorm.weight": size}
    vectors |= {"layers.0.post_attention_layernorm.weight": size}
    vectors |= {f"layers.0.self_attn.{name}_norm.weight": dim for name in "qk"}
    plain = {"fc.weight": (size, 2 * size), "layers.0.mlp.gate.weight": (count, size)}
    plain |= {"layers.0.mlp.shared_expert_gate.weight": (1, size)}
    matrices: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (2 * heads * dim, size),
        "self_attn.k_proj.weight": (2 * dim, size),
        "self_attn.v_proj.weight": (2 * dim, size),
        "self_attn.o_proj.weight": (size, heads * dim),
    }
    for expert in ("shared_expert", *(f"experts.{i}" for i in range(0 if stacked else count))):
        matrices |= {f"mlp.{expert}.{part}_proj.weight": (inner, size) for part in ("gate", "up")}
        matrices[f"mlp.{expert}.down_proj.weight"] = (size, inner)
    if stacked:
        matrices["mlp.experts.gate_up_proj"] = (count, 2 * inner, size)
        matrices["mlp.experts.down_proj"] = (count, size, inner)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    found |= {name: ("BF16", (length,)) for name, length in vectors.items()}
    found |= {name: ("BF16", shape) for name, shape in plain.items()}
    for name, shape in matrices.items():
        found[f"layers.0.{name}"] = ("F8_E4M3" if fp8 else "BF16", shape)
        if fp8:
            blocks = (*shape[:-2], *(-(-n // 128) for n in shape[-2:]))
            found[f"layers.0.{name}_scale_inv"] = ("BF16", blocks)
    return {f"mtp.{name}": entry for name, entry in found.items()}


def _settle(source: Path, cold: bool) -> None:
    """Bring the source into the page cache, or out of it, so that all read it alike."""
    if not cold:
        read_alone(source / SHARD)
        return
    with (source / SHARD).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _row(values: tuple[float, ...] | list[float]) -> str:
    read, write, quantize, alone, seconds, ratio, peak = values
    return (
        f"| {read:.1f} s | {write:.1f} s | {quantize:.1f} s | {alone:.1f} s | {seconds:.1f} s "
        f"| {ratio:.2f} | {peak:.2f} GB |"
    )


if __name__ == "__main__":
    sys.exit(main())
