"""Damaged model directories: the table in this process, and commands on it and on random ones."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.errors import ModelError
from mlx_mtp.models.hub import resolve_model
from mlx_mtp.models.loader import load_model
from mlx_mtp.text.tokenizer import Tokenizer
from tests.fuzz.damage import CASES, SECRET, SERVED, good_directory


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    good_directory(root / "model", "qwen3_next")
    (root / "secret").write_text(SECRET)
    return root


def start(path: Path) -> None:
    """Do what `serve` does before it is ready."""
    model = load_model(resolve_model(str(path)), enable_mtp=True, lazy=True)
    tokenizer = Tokenizer.load(path)
    model.load_weights()
    engine = build_engine(model, EngineConfig(), tokenizer.vocab_size, (), check=True)
    try:
        engine.launch()
    finally:
        engine.stop()


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_directory_is_refused_by_name(good: Path, tmp_path: Path, name: str) -> None:
    change, wanted = CASES[name]
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    change(tmp_path / "model")
    if wanted == SERVED:
        start(tmp_path / "model")
    else:
        with pytest.raises(ModelError, match=wanted):
            start(tmp_path / "model")


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "darwin", reason="a process that knows Metal can't be forked")
@pytest.mark.parametrize("flags", [[], ["--seconds=150", "--seed=1"]], ids=["table", "random"])
def test_inspect_and_serve_take_or_refuse_any_directory(flags: list[str]) -> None:
    argv = [sys.executable, "-m", "tests.fuzz.model_directories", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
