"""Files that the Finder leaves beside ours, and beside a model's, are ignored."""

import shutil
from pathlib import Path

from mlx_mtp.convert.files import link_model
from mlx_mtp.convert.source import open_source
from mlx_mtp.models.files import WEIGHTS
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.ranks.launch import fingerprint
from mlx_mtp.server import page
from tests.support.in_process import in_process

BROWSER = {"accept": "text/html"}
APPLE_DOUBLE = b"\0\5\x16\7\0\2\0\0Mac OS X"


def littered(source: Path, path: Path) -> Path:
    """Copy a folder as the Finder leaves it on a disk with a foreign file system."""
    shutil.copytree(source, path)
    for each in [path, *path.rglob("*")]:
        each.with_name(f"._{each.name}").write_bytes(APPLE_DOUBLE)
        if each.is_dir():
            (each / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    return path


def test_the_page_is_served(tmp_path, monkeypatch):
    ours = page.page_files()
    monkeypatch.setattr(page, "FOLDER", littered(page.FOLDER, tmp_path / "page"))
    (tmp_path / "page" / "app.js~").write_text("an editor's")
    (tmp_path / "page" / "app.orig").write_text("patch's")
    page.page_files.cache_clear()
    try:
        with in_process() as client:
            assert client.get("/", headers=BROWSER).status_code == 200
            assert client.get("/page/.DS_Store").status_code == 404
            assert page.page_files().keys() == ours.keys()
    finally:
        page.page_files.cache_clear()


def test_a_model_is_what_it_was(tmp_path):
    model = littered(BUNDLED_MODEL, tmp_path / "model")
    assert fingerprint(model) == fingerprint(BUNDLED_MODEL)
    assert [each.name for each in sorted(model.glob(WEIGHTS))] == [
        each.name for each in sorted(BUNDLED_MODEL.glob("*.safetensors"))
    ]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".DS_Store").write_bytes(b"another")
    link_model(model, tmp_path / "linked")
    assert (tmp_path / "linked" / "config.json").is_symlink()
    (model / "model.safetensors.index.json").unlink()  # then all files are examined
    assert open_source(str(model), None).files == open_source(str(BUNDLED_MODEL), None).files
