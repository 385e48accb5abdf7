"""The package as it is installed: a wheel, in an environment of its own, away from the clone."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mtp import __version__
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.server.page import page_files
from tests.support.process import CHAT, STORY, running

ROOT = Path(__file__).parents[1]
EXTRA = "[cpu]" if platform.system() == "Linux" else ""


def python(*arguments: object) -> str:
    argv = [sys.executable, *map(str, arguments)]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_wheel_serves_from_an_empty_environment(tmp_path, monkeypatch):
    tree, environment = tmp_path / "tree", tmp_path / "environment"
    # A copy: setuptools packs what earlier builds have left in the clone.
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mlx_mtp", tree / "mlx_mtp", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    python(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, tree)
    (wheel,) = tmp_path.glob("mlx_mtp-*.whl")
    python("-m", "venv", environment)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(environment / "bin" / "python"))
    python(*pip, "install", f"{wheel}{EXTRA}")
    where = Path(python("-c", "import mlx_mtp; print(mlx_mtp.__file__)").strip()).parent
    assert where.is_relative_to(environment)
    for path in BUNDLED_MODEL.glob("*.[jms]*"):
        assert path.read_bytes() == (where / "demo" / path.name).read_bytes()
    for name, file in page_files().items():
        assert file.content == (where / "page" / name).read_bytes()
    command = environment / "bin" / "mlx-mtp"
    for words, shown in (("--version", __version__), ("models --memory 16", "Qwen3.5-9B")):
        argv = [command, *words.split()]
        assert shown in subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    with running("--calibration-seconds", "0") as server:
        messages = [{"role": "user", "content": STORY}]
        answer = server.post(CHAT, messages=messages, max_tokens=24, temperature=0).json()
        assert answer["usage"]["completion_tokens"] == 24
        assert answer["timings"]["draft_n_accepted"] > 0
