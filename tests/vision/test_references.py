"""Results equal those of mlx-vlm 0.7.10 and of transformers' image processor on PIL.

Results of a small job are recorded; `python -m tests.vision.test_references` records them again.
"""

import gc
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from mlx_mtp.engine.prompts import Prompts
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import StepRow
from mlx_mtp.models.tower_weights import load_tower
from mlx_mtp.vision.images import ImageSizes, Pixels, read_image
from mlx_mtp.vision.placed import PlacedImage, PromptImages
from mlx_mtp.vision.tower import TowerShape, VisionTower, patches_of
from tests.conformance.sources import Package, directory
from tests.support.harness import greedy, request
from tests.support.tiny_models import Layout, config_json, hf_tensors
from tests.vision.seeing import rows_of, seeing, slow_logits

RECORDED = Path(__file__).parents[1] / "data" / "vision.npz"
PEER = Package(
    "mlx-vlm",
    "mlx-vlm==0.7.10",
    "f112ddaaf1bf0dd1efa702b5675a27df3345614e69e3996d3fbd09d838b8333d",
    ".",
    ("mlx_vlm",),
    wheel=True,
)
LAYOUT = Layout("qwen3_5", sees=True)
PAD, START, END = 90, 92, 93
SIZES = ImageSizes(patch=4, merge=2, least_pixels=256, most_pixels=1 << 14, most_tokens=1 << 20)
SMALL = [(1, 1), (17, 13), (9, 40), (150, 170)]
LARGE = [*SMALL, (100, 300), (480, 640), (9, 1700), (1, 200), (511, 513), (3000, 4000)]


def drawn(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([(7 * x + 3 * y) % 256, (x * x + y) % 256, (x ^ y) * 5 % 256], -1).astype(
        np.uint8
    )


def random_prompts(count: int) -> list[tuple[list[int], list[list[int]]]]:
    """Returns prompts of 1 to 4 images: ids, and each image's [time, rows, columns] in patches."""
    random = np.random.default_rng(5)
    prompts = []
    for _ in range(count):
        ids, grids = random.integers(4, 80, random.integers(1, 9)).tolist(), []
        for _ in range(random.integers(1, 5)):
            rows, columns = (2 * random.integers(1, 7, 2)).tolist()
            grids.append([1, rows, columns])
            ids += [START, *[PAD] * (rows * columns // 4), END]
            ids += random.integers(4, 80, random.integers(0, 9)).tolist()
        prompts.append(([*ids, 5], grids))
    return prompts


def job(sizes, num_prompts: int, every: int = 1, shape=SIZES) -> dict:
    config = config_json(LAYOUT)
    config["vision_config"] = config["vision_config"] | {
        "patch_size": shape.patch,
        "model_type": "qwen3_5",
    }
    layout_tensors = hf_tensors(LAYOUT) if shape is SIZES else {}
    tokens = [shape.fitted(*size) for size in SMALL[1:3]]
    ids = [7, 8]
    for height, width in tokens:
        ids += [START, *[PAD] * (height * width // shape.token**2), END, 9]
    told = {
        "config": config,
        "least": shape.least_pixels,
        "most": shape.most_pixels,
        "num_images": len(sizes),
        "every": every,
        "prompts": random_prompts(num_prompts),
        "answer": [ids, [1, 2]] if every == 1 else None,
    }
    arrays = {f"image{n}": drawn(*size) for n, size in enumerate(sizes)}
    weights = {f"w.{name}": value for name, value in layout_tensors.items()}
    return {"told": told, **arrays, **weights}


def peer(given: dict, path: str) -> dict[str, np.ndarray]:
    """Returns mlx-vlm's results for a job; `path` is the directory with mlx-vlm."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("job.npz", "result.npz")]
        np.savez(files[0], **(given | {"told": json.dumps(given["told"])}))
        script = str(Path(__file__).with_name("peer.py"))
        environment = os.environ | {"PYTHONPATH": path}
        subprocess.run([sys.executable, script, *files], check=True, env=environment, timeout=600)
        with np.load(files[1]) as result:
            return dict(result)


def check(given: dict, expected: dict[str, np.ndarray], shape: ImageSizes = SIZES) -> None:
    told = given["told"]
    visual = {k.removeprefix("w."): mx.array(v) for k, v in given.items() if "visual" in k}
    tower = load_tower(told["config"], visual, 64) if visual else None
    patch = shape.patch
    for number in range(told["num_images"]):
        buffer = io.BytesIO()
        Image.fromarray(given[f"image{number}"]).save(buffer, "PNG")
        found = read_image(buffer.getvalue(), shape)
        rgb = np.frombuffer(found.rgb, np.uint8).reshape(found.height, found.width, 3)
        assert [n // patch for n in rgb.shape[:2]] == expected[f"grid{number}"].tolist()
        form = tower.shape if tower else _Shape(patch)
        patches = np.array(patches_of(mx.array(rgb), form))[:: told["every"]]
        # The processor has channels first.
        patches = patches.reshape(-1, 2, patch, patch, 3).transpose(0, 4, 1, 2, 3)
        flat = patches.reshape(len(patches), -1)
        assert np.abs(flat - expected[f"patches{number}"]).max() < 1e-5
        if tower is not None:
            assert np.abs(np.array(rows_of(tower, rgb)) - expected[f"rows{number}"]).max() < 1e-5
    for number, (ids, grids) in enumerate(told["prompts"]):
        places = [n + 1 for n, token in enumerate(ids) if token == START]
        nothing = Pixels(0, 0, b"", b"")
        placed = [
            PlacedImage(start, rows // 2, columns // 2, nothing)
            for start, (_, rows, columns) in zip(places, grids)
        ]
        images = PromptImages(placed, len(ids))
        assert np.array_equal(images.positions, expected[f"positions{number}"])
        assert images.shift == expected[f"shift{number}"].item()


class _Shape:
    """The attributes of a `TowerShape` that `patches_of` reads."""

    spatial_merge_size = temporal_patch_size = 2

    def __init__(self, patch: int) -> None:
        self.patch_size = patch


def small_job() -> dict:
    return job(SMALL, 12)


def test_recorded_results():
    with np.load(RECORDED) as recorded:
        check(small_job(), dict(recorded))


def test_the_recorded_logits(seeing_models):
    """mlx-vlm's logits of the whole model equal those of the engine tests' slow reference."""
    with np.load(RECORDED) as recorded:
        expected = recorded["logits"]
    items = [7, 8]
    for size in SMALL[1:3]:
        buffer = io.BytesIO()
        Image.fromarray(drawn(*size)).save(buffer, "PNG")
        items += [START, read_image(buffer.getvalue(), SIZES), END, 9]
    wanted = seeing("peer", items, greedy(1))
    found = np.array(slow_logits(seeing_models["qwen3_5"], wanted))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("hidden", "heads", "patch"),
    [(32, 2, 16), (256, 2, 8), (64, 16, 8)],
    ids=["patches", "keys", "scores"],
)
def test_the_planned_scratch_is_what_is_taken(hidden, heads, patch):
    """On the CPU, where mlx's attention stores all scores; each case has another largest part."""
    sizes = TowerShape(2, hidden, 2 * hidden, heads, 64, 36, patch_size=patch)
    tower = VisionTower(sizes)
    mx.eval(tower.parameters())
    side = 2 * patch
    pixels = Pixels.of(16 * side, 16 * side, bytes(3 * (16 * side) ** 2))
    images = PromptImages([PlacedImage(1, 16, 16, pixels)], 260)
    wanted = replace(request("x", range(260), greedy(1)), images=images)
    gc.collect()
    taken = []
    for _ in range(2):  # Another thread can free arrays of earlier tests meanwhile, but only once.
        row = StepRow(Sequence(wanted, (), 1), 0, 259)
        prompts = Prompts(SimpleNamespace(tower=tower))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        assert not prompts.see(row) and prompts.see(row)
        taken.append(mx.get_peak_memory() - min(before, mx.get_active_memory()))
    planned = sizes.scratch(256, 4)
    assert 0.6 * planned < max(taken) <= planned


@pytest.mark.full
def test_as_mlx_vlm_computes():
    path = str(directory(PEER))
    given = job(SMALL, 200)
    check(given, peer(given, path))
    published = ImageSizes(most_pixels=4096 * 1024)
    given = job(LARGE, 0, every=97, shape=published)
    check(given, peer(given, path), published)


if __name__ == "__main__":
    np.savez_compressed(RECORDED, **peer(small_job(), str(directory(PEER))))
