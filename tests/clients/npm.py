"""npm packages for tests: pinned here, installed once into a cache directory outside the tree."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import platformdirs
import pytest

HERE = Path(__file__).parent
INSTALL_SECONDS = 600
_KEPT = ("LANG", "PYTHONPATH", "SSL_CERT_FILE", "TMPDIR")
_LOCK = "package-lock.json"


def installed(folder: Path) -> Path:
    """Returns the directory with the `node_modules` of `folder/package.json`; skips without npm."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    files = [file for file in (folder / "package.json", folder / _LOCK) if file.exists()]
    # Each list of versions has its own directory: a new pin causes a new installation.
    name = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    root = Path(
        os.environ.get("MLX_MTP_TEST_NPM_DIR")
        or platformdirs.user_cache_path("mlx-mtp", appauthor=False) / "test-npm"
    )
    place = root / f"{folder.name}-{name}"
    if not place.exists():
        made = root / f"{place.name}.{os.getpid()}"
        made.mkdir(parents=True)
        for file in files:
            shutil.copy(file, made)
        how = ["ci"] if (folder / _LOCK).exists() else ["install", "--no-package-lock"]
        _install([npm, *how, "--no-audit", "--no-fund", "--loglevel=error"], made)
        made.rename(place)
    return place


def _install(command: list[str], place: Path) -> None:
    quietly = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, cwd=place, timeout=INSTALL_SECONDS, **quietly)
    if done.returncode == 0:
        return
    shutil.rmtree(place, ignore_errors=True)
    told = done.stderr.strip()
    # Only network errors skip the test: wrong pins must fail.
    if any(code in told for code in ("ENOTFOUND", "ECONNREFUSED", "EAI_AGAIN", "ETIMEDOUT")):
        pytest.skip(f"npm reaches no registry: {told.splitlines()[0]}")
    raise AssertionError(f"npm installs nothing: {told[-2000:]}")


def environment(place: Path, home: Path, **more: str) -> dict[str, str]:
    """Returns variables for programs in `place`: its commands first on PATH, and HOME = `home`."""
    kept = {k: v for k, v in os.environ.items() if k in _KEPT}
    path = f"{place / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "HOME": str(home), "TERM": "dumb", "CI": "1", **more}
