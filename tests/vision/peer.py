"""Computes a job of `test_references` with mlx-vlm and transformers: peer.py JOB.npz RESULT.npz.

mlx-vlm must be on the path; nothing of this project is imported.
"""

import json
import sys

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.qwen3_5 import Model, ModelConfig
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


def main(job_file: str, result_file: str) -> None:
    job = np.load(job_file)
    told = json.loads(str(job["told"]))
    config, tower = told["config"], told["config"]["vision_config"]
    model = Model(ModelConfig.from_dict(config))
    weights = {k.removeprefix("w."): mx.array(job[k]) for k in job if k.startswith("w.")}
    if weights:
        weights = model.sanitize(weights)
        known = {name for name, _ in tree_flatten(model.parameters())}
        model.load_weights([(k, v) for k, v in weights.items() if k in known], strict=True)
    processor = Qwen2VLImageProcessorPil(
        patch_size=tower["patch_size"],
        merge_size=tower["spatial_merge_size"],
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": told["least"], "longest_edge": told["most"]},
    )
    result = {}
    for number in range(told["num_images"]):
        found = processor(images=[Image.fromarray(job[f"image{number}"])], return_tensors="np")
        patches, grid = (np.asarray(found[k]) for k in ("pixel_values", "image_grid_thw"))
        result[f"grid{number}"] = grid[0, 1:]
        result[f"patches{number}"] = patches[:: told["every"]]
        if told["every"] == 1:
            rows, _ = model.vision_tower(mx.array(patches), mx.array(grid))
            result[f"rows{number}"] = np.array(rows)
    for number, (ids, grids) in enumerate(told["prompts"]):
        where, shift = model.language_model.get_rope_index(mx.array([ids]), mx.array(grids))
        result[f"positions{number}"] = np.array(where)[:, 0].T
        result[f"shift{number}"] = np.array(shift)[0]
    if told["answer"] is not None:
        ids, which = told["answer"]
        images = [Image.fromarray(job[f"image{n}"]) for n in which]
        found = processor(images=images, return_tensors="np")
        given = {k: mx.array(np.asarray(found[k])) for k in ("pixel_values", "image_grid_thw")}
        result["logits"] = np.array(model(mx.array([ids]), **given).logits[0, -1])
    np.savez_compressed(result_file, **result)


main(*sys.argv[1:])
