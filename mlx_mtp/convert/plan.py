"""Everything that a conversion will do, decided and checked before a byte is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mtp.convert.sidecar import describe
from mlx_mtp.convert.source import Source, norm_convention, trunk_tensor
from mlx_mtp.convert.target import Setting, Target
from mlx_mtp.convert.tensors import SafetensorsFile, StoredTensor
from mlx_mtp.errors import CheckpointError
from mlx_mtp.models.head_weights import (
    EXPERT_KEY,
    NORMS,
    TIED,
    Convention,
    HeadTensors,
    load_into,
    to_mlx,
)
from mlx_mtp.units import size_text

_EXPERTS_AT_ONCE = 8
_ROWS_COMPARED = 4096
_MLX_CACHE_BYTES = 64 << 20


class Plan:
    """What becomes of every tensor of a source's head.

    Args:
        paths: the source's files that hold the head.
        flags: for the quantization.
        asked_norms: the flag --mtp-norms.

    Attributes:
        header: the sidecar's metadata but for the checksums.
        specs: type and shape of every tensor of the sidecar; together they take `nbytes`.

    Raises:
        ModelError: a tensor is missing or doesn't fit, or the norms are of unknown convention.
    """

    def __init__(
        self,
        target: Target,
        source: Source,
        paths: Iterable[Path],
        flags: Mapping[str, Any],
        asked_norms: Convention | None,
    ) -> None:
        self._source, self._files = source.name, [SafetensorsFile(path) for path in paths]
        tensors = source.tensors(self._files)
        self._copies = {name: tensors.pop(name) for name in TIED if name in tensors}
        self._tensors = tensors
        self._convention = norm_convention(self._files, source, asked_norms)
        head = target.head(moe=source.is_moe)
        self._num_parameters = sum(value.size for _, value in tree_flatten(head.parameters()))
        self._default, self._settings = target.quantization(head, flags)
        # What is loaded where a source is served as it is: this checks names, shapes and packing.
        like = {name: tensor.like() for name, tensor in tensors.items()}
        _check_experts(like, source.name)
        stored = self._renamed(like)
        load_into(head, stored, source.name)
        self._packed = {
            path: Setting(module.bits, module.group_size, module.mode)
            for path, module in head.named_modules()
            if "scales" in module
        }
        if self._packed and not flags:
            self._settings |= self._packed
            self._default = self._settings.get("fc")
        self.header = describe(source, target, self._default, self._settings, self._convention)
        self.specs = {name: (a.dtype, a.shape) for name, a in self._encoded(stored).items()}
        self.nbytes = sum(prod(shape) * dtype.size for dtype, shape in self.specs.values())

    def __str__(self) -> str:
        others = [f"{path} {s}" for path, s in self._settings.items() if s != self._default]
        how = "; ".join([str(self._default or "unquantized"), *others])
        packed = " The source's head is quantized already." if self._packed else ""
        is_hf = self._convention == "hf"
        norms = "zero-centred in the source, 1 is added" if is_hf else "as MLX has them already"
        size = f"{self._num_parameters / 1e6:,.1f} M parameters, {size_text(self.nbytes)}"
        return f"{size}, {how}.{packed} Norms: {norms}."

    def report_copies(self, source: Source) -> None:
        """Print which copies of the trunk's matrices are left out, and whether they are copies."""
        for name, copy in self._copies.items():
            # With tied embeddings there is no lm_head.
            names = (*(["lm_head.weight"] if "head" in name else []), "embed_tokens.weight")
            trunk = next(filter(None, (trunk_tensor(source.repo, each) for each in names)), None)
            line = f"mtp.{name} is left out, as the trunk's own is used"
            if trunk is None:
                print(f"{line}; not compared, as the source's trunk is not on this machine.")
                continue
            rows = min(copy.shape[0], _ROWS_COMPARED)
            # From a file of its own: the checksums are of what the head takes over.
            copy = SafetensorsFile(copy.file.path).tensors[copy.name]
            if copy.shape != trunk.shape or not mx.array_equal(
                copy.part(0, rows).read(), trunk.part(0, rows).read()
            ):
                print(f"warning: {line}, but it is not equal to it.", file=sys.stderr)
            else:
                print(f"{line}; they are equal.")

    def metadata(self) -> dict[str, str]:
        """The whole header, with checksums of what has been read by now."""
        sums = {
            f.path.name: {"size": f.size, "head_sha256": f.digest.hexdigest()} for f in self._files
        }
        return {**self.header, "source_files": json.dumps(sums, separators=(",", ":"))}

    def read_through(self) -> None:
        """Read what `run` would read, for the checksums alone."""
        for _, tensors in self._groups():
            for tensor in tensors.values():
                tensor.read()

    def run(self, write: Callable[[int, dict[str, mx.array]], object]) -> None:
        """Read, quantize and write some experts, or one other tensor, at a time.

        On the CPU even where there is a GPU.

        Args:
            write: called with the number of the first expert and the tensors as bytes.
        """
        cache_limit = mx.set_cache_limit(_MLX_CACHE_BYTES)
        computing: tuple[int, dict[str, mx.array]] | None = None
        with mx.stream(mx.cpu):
            for first, tensors in self._groups():
                stored = {name: tensor.read() for name, tensor in tensors.items()}
                encoded = self._encoded(self._renamed(stored))
                encoded = {k: mx.contiguous(v).view(mx.uint8) for k, v in encoded.items()}
                # mlx's thread quantizes these while the last are written and the next are read.
                mx.async_eval(encoded)
                if computing:
                    write(*computing)
                computing = first, encoded
            if computing:
                write(*computing)
        mx.set_cache_limit(cache_limit)

    def _renamed(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Names, stacks and norms of `MTPHead`; what is not packed in bfloat16 or float16."""
        rounded = {}
        for name, value in tensors.items():
            if name in NORMS:
                value = value.astype(mx.float32)
            elif value.dtype == mx.float32 and not name.endswith((".scales", ".biases")):
                value = value.astype(mx.bfloat16)
            rounded[name] = value
        return to_mlx(HeadTensors(rounded, self._convention, self._source))

    def _encoded(self, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """The sidecar's tensors, not evaluated, of the whole head or some of its parameters."""
        encoded = dict(tensors)
        for path in {**self._packed, **self._settings}:
            names = [f"{path}.{part}" for part in ("weight", "scales", "biases")]
            parts = [tensors[name] for name in names if name in tensors]
            packing, setting = self._packed.get(path), self._settings.get(path)
            if not parts or packing == setting:
                continue
            for name in names:
                encoded.pop(name, None)
            if packing:
                parts = [packing.dequantize(parts)]
            if setting:
                parts = setting.quantize(parts[0])
            encoded |= zip(names, parts)
        return encoded

    def _groups(self) -> list[tuple[int, dict[str, StoredTensor]]]:
        """What is converted together, and the number of its first expert."""
        groups: dict[tuple[str, int], dict[str, StoredTensor]] = {}
        for name, tensor in self._tensors.items():
            match, module = EXPERT_KEY.match(name), name.rpartition(".")[0]
            if match:
                number = int(match[2]) % _EXPERTS_AT_ONCE
                renamed = f"{match[1]}.{number}.{match[3]}.weight"
                key = match[1], int(match[2]) - number
                groups.setdefault(key, {})[renamed] = tensor
            elif len(tensor.shape) == 3:
                for first in range(0, tensor.shape[0], _EXPERTS_AT_ONCE):
                    some = tensor.part(first, min(first + _EXPERTS_AT_ONCE, tensor.shape[0]))
                    groups.setdefault((module, first), {})[name] = some
            else:
                groups.setdefault((module, 0), {})[name] = tensor
        return [(first, tensors) for (_, first), tensors in groups.items()]


def _check_experts(tensors: Mapping[str, mx.array], source: str) -> None:
    """Stacks are made of some experts at a time, so all have to be alike."""
    first: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {}
    for name, value in tensors.items():
        if match := EXPERT_KEY.match(name):
            expected = first.setdefault(match[3], (value.shape, value.dtype))
            if expected != (value.shape, value.dtype):
                raise CheckpointError(
                    f"mtp.{name} in {source} has shape {value.shape} and type {value.dtype}, "
                    f"another expert has {expected[0]} and {expected[1]}."
                )
