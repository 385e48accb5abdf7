"""The plan of a conversion, decided and checked before a byte is written."""

import itertools
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from os import cpu_count
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mtp import __version__
from mlx_mtp.console import say_wrapped, size_text
from mlx_mtp.convert.files import FORMAT_VERSION_KEY, SafetensorsFile, StoredTensor
from mlx_mtp.convert.source import Source, norm_convention
from mlx_mtp.convert.target import UNQUANTIZED, Setting, Target
from mlx_mtp.convert.tied import compare_tied
from mlx_mtp.errors import CheckpointError
from mlx_mtp.models import head_weights
from mlx_mtp.progress import Bar

_GROUPS_AHEAD = 4
_TRUNK = ("hidden_size", "vocab_size", "num_hidden_layers")


class ConversionPlan:
    """How every tensor of a source's head is converted; complete after `open`."""

    def __init__(self, target: Target, source: Source, flags: Mapping[str, Any]) -> None:
        self._target, self._source, self._flags = target, source, flags
        self._head = target.new_head(moe=source.is_moe)
        self.default, self._settings = target.quantization_settings(self._head, flags)
        self.header = self._describe("hf")  # the sidecar's metadata, without checksums

    def open(self, paths: Iterable[Path], asked_norms: head_weights.Convention | None) -> None:
        """Complete the plan from the headers of the head's files, check it, and print a summary.

        Sets `like`, zeros of the type and shape of each of the sidecar's tensors, and `nbytes`,
        their size. Raises CheckpointError or ConvertError if the head can't be converted.
        """
        self._files = [SafetensorsFile(path) for path in paths]
        tensors = self._source.tensors(self._files)
        copies = {name: tensors.pop(name) for name in head_weights.TIED if name in tensors}
        self.groups = _groups(tensors)
        self._convention = norm_convention(self._files, self._source, asked_norms)
        num_parameters = sum(value.size for _, value in tree_flatten(self._head.parameters()))
        like = {name: tensor.like() for name, tensor in tensors.items()}
        self._check_experts(like)
        # Load `stored` as if the source were served: this checks names, shapes and packing.
        stored = self._renamed(like)
        head_weights.load_into(self._head, stored, self._source.name)
        self._packed = {
            path: Setting(module.bits, module.group_size, module.mode)
            for path, module in self._head.named_modules()
            if "scales" in module
        }
        if self._packed and not self._flags:
            self._settings |= self._packed
            self.default = self._settings.get("fc")
        self.header = self._describe(self._convention)
        self.like = self._encoded(stored)
        self.nbytes = sum(array.nbytes for array in self.like.values())
        self._report(num_parameters)
        for name, copy in copies.items():
            equal, text = compare_tied(name, copy, self._target, self._source)
            line = f"mtp.{name} is left out, as the trunk's own is used: {text}."
            say_wrapped(line if equal else f"warning: {line}", file=None if equal else sys.stderr)
        for file in self._files:
            file.digest = sha256()  # of the tensors to convert, without the copies compared above

    def _check_experts(self, tensors: Mapping[str, mx.array]) -> None:
        # An expert's offset in the stack is computed, so all experts need the same shape and type.
        for name, value in tensors.items():
            match = head_weights.EXPERT_KEY.match(name)
            first = tensors.get(f"{match[1]}.0.{match[3]}", value) if match else value
            if (value.shape, value.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"mtp.{name} in {self._source.name} has shape {value.shape} and type "
                    f"{value.dtype}, expert 0 has {first.shape} and {first.dtype}."
                )

    def _describe(self, convention: head_weights.Convention) -> dict[str, str]:
        table = {path: setting._asdict() for path, setting in sorted(self._settings.items())}
        shown = self.default or Setting(UNQUANTIZED, 0, "none")
        return {
            "format": "mlx",
            FORMAT_VERSION_KEY: "1",
            head_weights.NORM_CONVENTION_KEY: "mlx",
            "created_by": f"mlx-mtp {__version__}",
            "source": self._source.name,
            "source_revision": self._source.repo.commit_hash or "",
            "source_norm_convention": convention,
            **{key: str(value) for key, value in shown._asdict().items()},
            "quantization": json.dumps(table, separators=(",", ":")),
            **{name: str(getattr(self._target.args, name)) for name in _TRUNK},
        }

    def _report(self, num_parameters: int) -> None:
        size = f"{num_parameters / 1e6:,.1f} M parameters, {size_text(self.nbytes)}"
        others = [f"{path} {s}" for path, s in self._settings.items() if s != self.default]
        how = "; ".join([str(self.default or "unquantized"), *others])
        packed = " The source's head is quantized already." if self._packed else ""
        norms = {"hf": "zero-centred in the source, 1 is added", "mlx": "as MLX has them already"}
        head = f"Head of {self._source.name}: {size}, {how}.{packed}"
        say_wrapped(f"{head} Norms: {norms[self._convention]}.")

    def metadata(self) -> dict[str, str]:
        """Returns the sidecar's metadata, with checksums of the bytes that were read so far."""
        sums = {
            f.path.name: {"head_sha256": f.digest.hexdigest(), "size": f.size} for f in self._files
        }
        return {**self.header, "source_files": json.dumps(sums, separators=(",", ":"))}

    def read_through(self) -> None:
        """Read the same tensors as `converted`, only to compute the checksums."""
        for _, tensors in self.groups:
            for tensor in tensors.values():
                tensor.read()

    def converted(self) -> Iterator[tuple[int, dict[str, mx.array]]]:
        """Yields an expert's number and its tensors for the sidecar as bytes; shows a bar."""
        # The CPU quantizes the next experts while the caller writes, even if there is a GPU.
        streams = [mx.new_stream(mx.cpu) for _ in range(min(cpu_count() or 1, 8))]
        pending: deque[tuple[int, dict[str, mx.array]]] = deque()
        with Bar(desc="Converting", total=self.nbytes) as bar:
            for (expert, tensors), stream in zip(self.groups, itertools.cycle(streams)):
                with mx.stream(stream):
                    stored = {name: tensor.read() for name, tensor in tensors.items()}
                    encoded = self._encoded(self._renamed(stored))
                    encoded = {k: mx.contiguous(v).view(mx.uint8) for k, v in encoded.items()}
                mx.async_eval(encoded)
                bar.update(sum(array.nbytes for array in encoded.values()))
                pending.append((expert, encoded))
                if len(pending) > _GROUPS_AHEAD:
                    yield pending.popleft()
            yield from pending

    def _renamed(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Returns tensors with the names, stacks and norms of `MTPHead`.

        Unquantized float32 becomes bfloat16.
        """
        rounded = dict(tensors)
        for name, value in tensors.items():
            if name in head_weights.NORMS:
                rounded[name] = value.astype(mx.float32)
            elif value.dtype == mx.float32 and not name.endswith((".scales", ".biases")):
                rounded[name] = value.astype(mx.bfloat16)
        return head_weights.to_mlx(
            head_weights.HeadTensors(rounded, self._convention, self._source.name)
        )

    def _encoded(self, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns the sidecar's tensors for some or all of the head's parameters, unevaluated."""
        encoded = dict(tensors)
        for path in {**self._packed, **self._settings}:
            names = [f"{path}.{part}" for part in ("weight", "scales", "biases")]
            parts = [encoded[name] for name in names if name in encoded]
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


def _groups(tensors: Mapping[str, StoredTensor]) -> list[tuple[int, dict[str, StoredTensor]]]:
    """Returns groups of tensors to convert together: an expert's, with its number, or a module's.

    A module without experts has the number 0.
    """
    groups: dict[tuple[str, int], dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        if match := head_weights.EXPERT_KEY.match(name):
            first = f"{match[1]}.0.{match[3]}"
            groups.setdefault((match[1], int(match[2])), {})[first] = tensor
        elif len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                groups.setdefault((module, expert), {})[name] = tensor.sliced(expert, expert + 1)
        else:
            groups.setdefault((module, 0), {})[name] = tensor
    return [(expert, group) for (_, expert), group in groups.items()]
