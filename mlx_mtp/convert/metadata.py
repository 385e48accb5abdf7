"""What a sidecar's header says of how it was made, and whether another run would make the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlx_mtp import __version__
from mlx_mtp.convert.rows import Setting
from mlx_mtp.convert.safetensors_file import SafetensorsFile
from mlx_mtp.convert.source import Source
from mlx_mtp.convert.target import Target
from mlx_mtp.errors import CheckpointError
from mlx_mtp.models.head_weights import NORM_CONVENTION_KEY, Convention, sidecar_files

FORMAT_VERSION_KEY = "mlx_mtp_format_version"
FORMAT_VERSION = "1"
_FILES = "source_files"
# What makes two sidecars the same. The source's name is not in it: its contents are.
_COMPARED = (
    *(FORMAT_VERSION_KEY, "bits", "group_size", "mode", "quantization", "source_norm_convention"),
    *("hidden_size", "vocab_size", "num_hidden_layers"),
)


def describe(
    source: Source,
    target: Target,
    default: Setting | None,
    settings: Mapping[str, Setting],
    convention: Convention,
) -> dict[str, str]:
    """Header entries but for the checksums.

    Args:
        source: of the head.
        target: the model it is for.
        default: quantization of most matrices; None without.
        settings: of each quantized matrix, by path.
        convention: of the source's norms.
    """
    table = {
        path: {"bits": s.bits, "group_size": s.group_size, "mode": s.mode}
        for path, s in sorted(settings.items())
    }
    return {
        "format": "mlx",
        FORMAT_VERSION_KEY: FORMAT_VERSION,
        "created_by": f"mlx-mtp {__version__}",
        "source": source.name,
        "source_revision": source.revision or "",
        "source_norm_convention": convention,
        NORM_CONVENTION_KEY: "mlx",
        "bits": str(default.bits) if default else "16",
        "group_size": str(default.group_size) if default else "0",
        "mode": default.mode if default else "none",
        "quantization": json.dumps(table, separators=(",", ":")),
        **target.trunk_metadata(),
    }


def with_checksums(metadata: Mapping[str, str], files: list[SafetensorsFile]) -> dict[str, str]:
    """Add the source's files: size, and a SHA-256 of the head's bytes as they were read."""
    told = {f.path.name: {"size": f.size, "head_sha256": f.digest.hexdigest()} for f in files}
    return {**metadata, _FILES: json.dumps(told, sort_keys=True, separators=(",", ":"))}


@dataclass(frozen=True)
class Existing:
    """A sidecar that is there already.

    Args:
        files: its files.
        metadata: of the first one's header; empty if it can't be read.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, str]

    @classmethod
    def find(cls, directory: Path) -> Existing | None:
        """The sidecar of a model directory."""
        try:
            files = sidecar_files(directory)
            if not files:
                return None
            with SafetensorsFile(files[0]) as file:
                return cls(tuple(files), file.metadata)
        except CheckpointError:
            return cls((), {})

    def differences(self, wanted: Mapping[str, str]) -> list[str]:
        """In which of the wanted entries it differs, checksums aside: `bits 4, not 8`."""
        if FORMAT_VERSION_KEY not in self.metadata:
            return ["it was not made by this program"]
        return [
            f"{key} {self.metadata.get(key, 'unknown')}, not {wanted[key]}"
            for key in _COMPARED
            if key in wanted and self.metadata.get(key) != wanted[key]
        ]

    def is_of_commit(self, source: Source) -> bool:
        """Whether it was made from the same commit of the same repository."""
        return (
            source.revision is not None
            and self.metadata.get("source") == source.name
            and self.metadata.get("source_revision") == source.revision
        )

    def has_checksums(self, wanted: Mapping[str, str]) -> bool:
        """Whether it was made from the same bytes."""
        return self.metadata.get(_FILES) == wanted[_FILES]
