"""Everything that a conversion will do, decided and checked before a byte is written."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import cpu_count

import mlx.core as mx
import numpy as np

from mlx_mtp.convert.convention import norm_convention
from mlx_mtp.convert.encode import Encoding, choose_encoding
from mlx_mtp.convert.layout import Layout, Piece, Weight
from mlx_mtp.convert.metadata import describe, with_checksums
from mlx_mtp.convert.output import SidecarWriter
from mlx_mtp.convert.quantization import Flags
from mlx_mtp.convert.rows import Setting, StoredTensor
from mlx_mtp.convert.safetensors_file import SafetensorsFile
from mlx_mtp.convert.source import Source, head_tensors
from mlx_mtp.convert.target import Target, shapes
from mlx_mtp.convert.writer import TensorSpec
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.family import text_config
from mlx_mtp.models.head_weights import Convention, check_shapes, has_router

# Rows are read in pieces of about this size, and so many of them at once as there are streams.
_PIECE_BYTES = 16 << 20
_MAX_STREAMS = 8
_MLX_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class Job:
    """Some rows of a source's matrix, and where they go.

    Args:
        piece: what to read.
        encoding: what to make of it.
        specs: the tensors that it becomes rows of.
        row: the first of these rows.
    """

    piece: Piece
    encoding: Encoding
    specs: Sequence[TensorSpec]
    row: int


@dataclass(frozen=True)
class Plan:
    """A conversion.

    Args:
        files: of the source, open.
        jobs: in the order of the disk.
        specs: every tensor of the sidecar.
        default: quantization of most matrices; None without.
        settings: of each quantized matrix, by path.
        header: the sidecar's metadata but for the checksums.
        tied: copies of the trunk's matrices that are left out, by name.
        notes: what the user should know.
    """

    files: list[SafetensorsFile]
    jobs: list[Job]
    specs: list[TensorSpec]
    default: Setting | None
    settings: dict[str, Setting]
    header: dict[str, str]
    tied: dict[str, StoredTensor]
    notes: list[str]

    @property
    def nbytes(self) -> int:
        """Size of the sidecar, header aside."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def num_parameters(self) -> int:
        """Weights of the head."""
        pieces = (job.piece for job in self.jobs)
        return sum((p.stop - p.start) * (p.rows.shape[-1]) for p in pieces)

    @property
    def quantization_text(self) -> str:
        """In words."""
        if self.default is None and not self.settings:
            return "unquantized"
        others = [f"{path} {s}" for path, s in self.settings.items() if s != self.default]
        return "; ".join([str(self.default or "unquantized"), *others])

    @property
    def metadata(self) -> dict[str, str]:
        """The whole header, with checksums of what has been read by now."""
        return with_checksums(self.header, self.files)

    def read_through(self) -> None:
        """Read what a run would read, for the checksums alone."""
        for job in self.jobs:
            job.piece.rows.read(job.piece.start, job.piece.stop)

    def run(self, writer: SidecarWriter, advance: Callable[[int], None]) -> None:
        """Read, encode and write, a few pieces at a time.

        On the CPU even where there is a GPU, so that the GPU never has to hold the experts. While
        mlx's threads work on some pieces this one reads the next and writes the last.
        """
        streams = [mx.new_stream(mx.cpu) for _ in range(min(cpu_count() or 1, _MAX_STREAMS))]
        cache_limit = mx.set_cache_limit(_MLX_CACHE_BYTES)
        pending: deque[tuple[Job, list[mx.array]]] = deque()
        try:
            for number, job in enumerate(self.jobs):
                with mx.stream(streams[number % len(streams)]):
                    piece = job.piece
                    encoded = job.encoding.encode(piece.rows, piece.start, piece.stop)
                    encoded = [array.view(mx.uint8) for array in encoded]
                mx.async_eval(*encoded)
                pending.append((job, encoded))
                if len(pending) > len(streams):
                    advance(_write(*pending.popleft(), writer))
            while pending:
                advance(_write(*pending.popleft(), writer))
        finally:
            mx.set_cache_limit(cache_limit)


def make_plan(
    target: Target,
    source: Source,
    files: list[SafetensorsFile],
    flags: Flags,
    asked_norms: Convention | None,
) -> Plan:
    """Decide what becomes of every tensor of a source's head.

    Args:
        target: the model.
        source: of the head.
        files: of the source that hold it, open.
        flags: for the quantization.
        asked_norms: the flag --mtp-norms.

    Raises:
        CheckpointError: a tensor is missing, of the wrong type or shape.
        ConvertError: head and model don't fit together, or the norms are of unknown convention.
    """
    tensors = head_tensors(source.file_of, files)
    _check_one_layer(tensors, source)
    head = target.head(moe=has_router(tensors))
    modules = dict(head.named_modules())
    layout = Layout(tensors, modules, source.fp8_block)
    expected, notes = shapes(head), []
    has_none = text_config(source.config).get("shared_expert_intermediate_size", 1) == 0
    if has_none and layout.add_absent_shared_expert(expected):
        notes.append("The source has no shared expert: zeros stand in for it, which adds nothing.")
    check_shapes({n: w.shape for n, w in layout.weights.items()}, expected, source.name)
    convention = norm_convention(files, source, asked_norms)
    quantization = target.quantization(head, flags)
    encodings = {
        name: choose_encoding(
            name,
            weight,
            quantization.settings.get(name.removesuffix(".weight")),
            convention,
            keep=not flags,
        )
        for name, weight in layout.weights.items()
    }
    settings = {n.removesuffix(".weight"): e.setting for n, e in encodings.items() if e.setting}
    default = quantization.default
    if any(weight.rows.setting for weight in layout.weights.values()):
        notes.append(_packed_note(flags))
        default = default if flags else settings.get("fc")
    jobs, specs = _jobs(layout.weights, encodings)
    header = describe(source, target, default, settings, convention)
    return Plan(files, jobs, specs, default, settings, header, layout.tied, notes)


def _check_one_layer(tensors: dict[str, StoredTensor], source: Source) -> None:
    found = {int(m[1]) for name in tensors if (m := re.match(r"layers\.(\d+)\.", name))}
    if found - {0}:
        raise ConvertError(
            f"The head in {source.name} has {max(found) + 1} layers; heads of one layer are "
            "supported, as Qwen3-Next, Qwen3.5, 3.6 and 3.8 have them."
        )


def _packed_note(flags: Flags) -> str:
    if flags:
        return "The source's head is quantized already: what differs is quantized a second time."
    return "The source's head is quantized already and is taken over as it is."


def _jobs(
    weights: dict[str, Weight], encodings: dict[str, Encoding]
) -> tuple[list[Job], list[TensorSpec]]:
    jobs: list[Job] = []
    all_specs: list[TensorSpec] = []
    for name, weight in weights.items():
        specs = encodings[name].specs(name, weight.shape)
        all_specs += specs
        row = 0
        for piece in weight.pieces:
            for part in _cut(piece):
                jobs.append(Job(part, encodings[name], specs, row))
                row += part.stop - part.start
    jobs.sort(key=lambda job: job.piece.rows.place(job.piece.start))
    return jobs, all_specs


def _cut(piece: Piece) -> Iterator[Piece]:
    step = max(_PIECE_BYTES // max(piece.rows.row_nbytes(), 1), 1)
    for start in range(piece.start, piece.stop, step):
        yield Piece(piece.rows, start, min(start + step, piece.stop))


def _write(job: Job, encoded: list[mx.array], writer: SidecarWriter) -> int:
    mx.eval(encoded)
    for spec, array in zip(job.specs, encoded, strict=True):
        writer.write(spec.name, job.row, np.array(array, copy=False))
    return sum(array.nbytes for array in encoded)
