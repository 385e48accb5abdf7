"""A source and a target checkpoint, and the converter run on them in this process."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.convert.convert import add_head
from mlx_mtp.errors import ModelError
from tests.support.checkpoints import encode_all, read_file, write_file, write_source, write_target
from tests.support.tiny_models import Layout, hf_tensors

LAYOUT = Layout("qwen3_next")
FOUR = {"group_size": 64, "bits": 4, "mode": "affine"}


class Pair:
    """A source checkpoint in three files and a 4-bit target; runs the converter on them."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.source, self.target = root / "source", root / "target"
        self._capsys = capsys
        write_source(self.source, LAYOUT, shards=3)
        write_target(self.target, LAYOUT, FOUR)

    @property
    def sidecar(self) -> Path:
        return self.target / "mtp.safetensors"

    def write(self, layout: Layout, storage: str = "BF16", table=None, **source) -> dict:
        """Replace both checkpoints; returns the values of the source's tensors, in float32."""
        for path in (*self.source.iterdir(), *self.target.iterdir()):
            path.unlink()
        write_target(self.target, layout, table)
        return write_source(self.source, layout, storage, **source)

    def rewrite(self, change) -> None:
        """Rewrite the source as one file, with its tensors changed by `change`."""
        tensors, _ = encode_all(hf_tensors(LAYOUT))
        change(tensors)
        for path in self.source.glob("model*"):
            path.unlink()
        write_file(self.source / "model.safetensors", tensors)

    def run(self, **options: object) -> str:
        """Run the converter; returns what it printed."""
        self._capsys.readouterr()
        add_head(str(self.target), self.source and str(self.source), **options)
        captured = self._capsys.readouterr()
        return captured.out + captured.err

    def convert(self, **options: object) -> dict[str, mx.array]:
        """Run the converter; returns the sidecar's tensors, by names without the prefix `mtp.`."""
        self.run(**options)
        tensors, _ = read_file(self.sidecar)
        return {name.removeprefix("mtp."): value for name, value in tensors.items()}

    def metadata(self) -> dict[str, str]:
        return read_file(self.sidecar)[1]

    def refused(self, error: type[ModelError], match: str, **options: object) -> None:
        """Run the converter; expect this error and an unchanged target directory."""
        before = snapshot(self.target)
        with pytest.raises(error, match=match):
            self.run(**options)
        assert snapshot(self.target) == before


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.fixture
def pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Pair:
    return Pair(tmp_path, capsys)
