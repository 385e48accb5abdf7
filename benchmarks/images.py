"""Images: the vision tower's time, and its share of the time to first token."""

import statistics
import time
from dataclasses import replace

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from benchmarks import Rows, row
from benchmarks.cores import core_of, random_ids
from benchmarks.prompts import first_token_seconds
from benchmarks.shapes import build, shape_of
from benchmarks.timed import within
from mlx_mtp.engine.prompts import Prompts
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import StepRow
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.vision.images import Pixels
from mlx_mtp.vision.placed import PlacedImage, PromptImages
from mlx_mtp.vision.tower import TowerShape, VisionTower

_SHAPE, _LAYERS = "Qwen3.5-27B", 64
_OF_27B = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
_TINY = {"depth": 4, "hidden_size": 288, "intermediate_size": 1076, "num_heads": 4}


def tower(
    layers: int = 8,
    tiny: bool = False,
    pause: float = 100.0,
    cases: tuple[str, ...] = ("1x4096", "1x1024", "4x1024", "4x4096"),
    seconds: float = 60,
) -> Rows:
    """Time of the 27B's vision tower beside the prefill of the same number of tokens.

    Weights are random; on a GPU the tower's are in BF16 and the model's in 4 bits. "ms" is the
    tower's time without a limit, and "limited, ms" its time in steps of at most --pause, which
    "longest, ms" (without the first two), "median, ms" and "steps" describe. "prefill, ms" is the
    time to first token of a prompt of the same length, scaled from --layers layers to all 64;
    "share" is the tower's share of both times.

    Args:
        layers: number of the model's layers, a multiple of 4
        pause: limit in milliseconds, as of --max-decode-pause
        cases: images x tokens of each image
    """
    model = build(shape_of(_SHAPE, layers, tiny))[0]
    size = model.causal_lm.args.hidden_size
    shape = TowerShape(
        **(_TINY if tiny else _OF_27B), out_hidden_size=size, num_position_embeddings=48 * 48
    )
    seeing = _random_tower(shape, model.dtype)
    core = core_of(model, None, prefill_step_size=2048)
    num_layers = len(model.causal_lm.model.layers)
    for step in (2048, 1024):  # compiles kernels
        first_token_seconds(core, random_ids(model.vocab_size, step, 0))
    _times(model, seeing, 1, 256, 0.0)
    for case in within(time.perf_counter() + seconds, cases):
        count, tokens = map(int, case.split("x"))
        whole = sum(_times(model, seeing, count, tokens, 0.0))
        limited = _times(model, seeing, count, tokens, pause / 1e3)
        prefill = first_token_seconds(core, random_ids(model.vocab_size, count * tokens, 1))
        prefill *= _LAYERS / num_layers
        figures = [whole, sum(limited), max(limited[2:], default=0.0), statistics.median(limited)]
        names = "images | tokens | ms | limited, ms | longest, ms | median, ms | steps"
        names += " | prefill, ms | share | tokens/s | scratch, GB"
        yield row(
            names,
            *(count, tokens, *(1e3 * each for each in figures), len(limited), 1e3 * prefill),
            *(whole / (whole + prefill), count * tokens / whole),
            shape.scratch(tokens, model.dtype.size) / 1e9,
        )


def _random_tower(shape: TowerShape, dtype: mx.Dtype) -> VisionTower:
    seeing = VisionTower(shape)
    drawn = [
        (name, (mx.random.normal(array.shape) / array.shape[-1] ** 0.5).astype(dtype))
        for name, array in tree_flatten(seeing.parameters())
    ]
    seeing.update(tree_unflatten(drawn))
    mx.eval(seeing.parameters())
    return seeing


def _times(
    model: LoadedModel, seeing: VisionTower, count: int, tokens: int, pause: float
) -> list[float]:
    """Returns the seconds of each tower step for `count` new images, with nothing else running."""
    prompts = Prompts(replace(model, tower=seeing), pause)
    side = seeing.shape.patch_size * seeing.shape.spatial_merge_size
    rows = 2 ** (int(tokens).bit_length() // 2)
    columns = tokens // rows
    random, placed = np.random.default_rng(tokens), []
    for number in range(count):
        shape = rows * side, columns * side, 3
        rgb = random.integers(0, 256, shape, np.uint8).tobytes()
        pixels = Pixels.of(shape[0], shape[1], rgb)
        placed.append(PlacedImage(number * (tokens + 1), rows, columns, pixels))
    length, times, seen = count * (tokens + 1), [], False
    wanted = Request("", (0,) * length, SamplingParams(1), images=PromptImages(placed, length))
    row = StepRow(Sequence(wanted, (), 1), 0, length)
    while not seen:
        began = time.perf_counter()
        seen = prompts.see(row)
        times.append(time.perf_counter() - began)
    return times[:-1]  # The last call only found all images done.
