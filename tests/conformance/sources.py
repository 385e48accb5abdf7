"""Where other projects' tests come from: pinned, checked by hash, unpacked into a cache."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import platformdirs
import pytest

DIRECTORY = "MLX_MTP_SUITES"
"""Names a directory that has unpacked sources, one folder each, named as the source."""
_SECONDS = 900


@dataclass(frozen=True)
class Package:
    """A file of the Python package index.

    Args:
        name: of the folder that it is unpacked into.
        requirement: the pinned package.
        pin: the file's SHA-256.
        root: the folder within the file that is taken.
        members: patterns of the paths below `root` that are taken.
        wheel: the wheel, not the source distribution.
    """

    name: str
    requirement: str
    pin: str
    root: str
    members: tuple[str, ...]
    wheel: bool = False

    def unpack(self, into: Path) -> None:
        """Download the file and unpack what is wanted of it."""
        with tempfile.TemporaryDirectory() as downloads:
            form = "--only-binary" if self.wheel else "--no-binary"
            _run(sys.executable, "-m", "unearth", self.requirement, form, "-d", downloads)
            (path,) = Path(downloads).iterdir()
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            assert found == self.pin, f"{path.name} has the SHA-256 {found}"
            for name, content in _files(path):
                below = PurePosixPath(name)
                if not below.is_relative_to(self.root):
                    continue
                inner = str(below.relative_to(self.root))
                if any(fnmatch.fnmatchcase(inner, pattern) for pattern in self.members):
                    target = into / inner
                    assert target.resolve().is_relative_to(into.resolve())
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)


@dataclass(frozen=True)
class Repository:
    """A git repository at the commit `pin`."""

    name: str
    url: str
    pin: str

    def unpack(self, into: Path) -> None:
        """Fetch the one commit."""
        _run("git", "init", "--quiet", str(into))
        _run("git", "-C", str(into), "fetch", "--quiet", "--depth", "1", self.url, self.pin)
        _run("git", "-C", str(into), "checkout", "--quiet", "FETCH_HEAD")


Source = Package | Repository


def directory(source: Source) -> Path:
    """The unpacked source, downloaded if it is not there yet; a test skips where it can't be."""
    own = os.environ.get(DIRECTORY)
    if own is not None and (Path(own) / source.name).is_dir():
        return Path(own) / source.name
    suites = Path(platformdirs.user_cache_dir("mlx-mtp")) / "suites"
    cached = suites / f"{source.name}-{source.pin[:12]}"
    if cached.is_dir():
        return cached
    suites.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f"{source.name}-", dir=suites))
    try:
        source.unpack(fresh)
        fresh.rename(cached)
    except subprocess.CalledProcessError as error:
        words = (error.stderr or error.stdout or str(error)).strip().splitlines()
        pytest.skip(f"{source.name} can't be downloaded: {words[-1] if words else error}")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return cached


def _run(*command: str) -> None:
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS, env=quiet)


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file in an archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            files = [info for info in wheel.infolist() if not info.is_dir()]
            yield from ((info.filename, wheel.read(info)) for info in files)
        return
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content.read()
