"""Where other projects' tests come from: pinned, checked by hash, unpacked into a cache."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import pytest


@dataclass(frozen=True)
class Package:
    """The folder `root` of a pinned package from the Python package index."""

    name: str
    requirement: str
    pin: str  # the file's SHA-256
    root: str
    members: Sequence[str] = (".",)  # files and folders of `root` to keep
    wheel: bool = False

    def unpack(self, into: Path) -> None:
        with tempfile.TemporaryDirectory() as downloads:
            form = "--only-binary" if self.wheel else "--no-binary"
            _run(sys.executable, "-m", "unearth", self.requirement, form, "-d", downloads)
            (path,) = Path(downloads).iterdir()
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            assert found == self.pin, f"{path.name} has the SHA-256 {found}"
            unpacked = Path(downloads) / "unpacked"
            how = {"format": "zip"} if self.wheel else {"filter": "data"}
            shutil.unpack_archive(path, unpacked, **how)
            for name in self.members:
                taken = unpacked / self.root / name
                if taken.is_file():
                    shutil.copy(taken, into / name)
                else:
                    shutil.copytree(taken, into / name, dirs_exist_ok=True)


@dataclass(frozen=True)
class Repository:
    """A git repository at the commit `pin`."""

    name: str
    url: str
    pin: str

    def unpack(self, into: Path) -> None:
        _run("git", "init", "--quiet", str(into))
        _run("git", "-C", str(into), "fetch", "--quiet", "--depth", "1", self.url, self.pin)
        _run("git", "-C", str(into), "checkout", "--quiet", "FETCH_HEAD")


def directory(source: Package | Repository) -> Path:
    """Returns the unpacked source's folder; downloads it if needed, or skips the test.

    MLX_MTP_SUITES can name a directory that has the source in a folder of the same name.
    """
    own = Path(os.environ.get("MLX_MTP_SUITES", os.devnull)) / source.name
    if own.is_dir():
        return own
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
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=900, env=quiet)
