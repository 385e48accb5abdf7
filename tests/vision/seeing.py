"""Requests with images, and a slow reference that computes each alone, in one piece."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.vision.images import Pixels
from mlx_mtp.vision.placed import PlacedImage, PromptImages
from mlx_mtp.vision.tower import VisionTower
from tests.support.cases import EOS, SAMPLED
from tests.support.harness import Driver, Plain, PlainMask, greedy, request
from tests.support.tiny_models import IMAGE_IDS, TOWER, VOCAB

SIDE = TOWER["patch_size"] * TOWER["spatial_merge_size"]
PAD = IMAGE_IDS["image_token_id"]
Item = int | Pixels


def picture(rows: int, columns: int, seed: int) -> Pixels:
    """Returns an image of noise with `rows` x `columns` tokens."""
    shape = rows * SIDE, columns * SIDE, 3
    rgb = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8).tobytes()
    return Pixels.of(shape[0], shape[1], rgb)


A, B, C = picture(3, 4, 1), picture(5, 2, 2), picture(1, 1, 3)


def seeing(name: str, items: Sequence[Item], sampling: SamplingParams, **more) -> Request:
    """Returns a request whose prompt consists of ids and images."""
    prompt: list[int] = []
    placed = []
    for item in items:
        if isinstance(item, Pixels):
            rows, columns = item.height // SIDE, item.width // SIDE
            placed.append(PlacedImage(len(prompt), rows, columns, item))
            prompt += [PAD] * (rows * columns)
        else:
            prompt.append(item)
    images = PromptImages(placed, len(prompt)) if placed else None
    return replace(request(name, prompt, sampling, **more), images=images)


def make_requests(kind: str):
    """Returns requests with images: one, several, adjacent, repeated, at the start, or tiny."""
    random = np.random.default_rng(3)

    def words(count):
        return random.integers(4, 90, count).tolist()

    prompts = [
        words(17),
        [*words(5), A, *words(3)],
        [A, *words(1)],
        words(3),
        [*words(2), B, *words(4), A, B, *words(20)],
        [*words(9), C, C, *words(2)],
        words(30),
        [*words(1), A, A, *words(7), C, *words(1)],
    ]
    samplings = SAMPLED if kind == "sampled" else [greedy(12), greedy(7), greedy(16)]
    choose = itertools.cycle(samplings)
    return [seeing(f"{kind}{number}", items, next(choose)) for number, items in enumerate(prompts)]


def seeing_driver(model: LoadedModel, config: EngineConfig, **more) -> Driver:
    return Driver(model, vocab_size=VOCAB, stop_ids=(EOS,), config=config, **more)


def slow_positions(wanted: Request) -> list[tuple[int, int, int]]:
    """Returns the time, row and column of each token, computed one token at a time."""
    inside = {}
    for image in wanted.images.images if wanted.images else ():
        for number in range(image.rows * image.columns):
            inside[image.start + number] = image, *divmod(number, image.columns)
    positions, following = [], 0
    for place in range(len(wanted.prompt_token_ids)):
        if place not in inside:
            positions.append((following,) * 3)
            following += 1
            continue
        image, row, column = inside[place]
        positions.append((following, following + row, following + column))
        if place == image.start + image.rows * image.columns - 1:
            following += max(image.rows, image.columns)
    return positions


@dataclass
class SlowRope:
    """Rotates [B, heads, T, D] by the three positions of each token, frequency by frequency."""

    positions: list[tuple[int, int, int]]
    dims: int
    base: float = 10000.0
    axes: tuple[int, ...] = (0, 1, 2, 0)

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        half = self.dims // 2
        angles = np.array(
            [
                [p[self.axes[i]] * self.base ** (-2 * i / self.dims) for i in range(half)]
                for p in self.positions[offset : offset + x.shape[2]]
            ]
        )
        cos, sin = mx.array(np.cos(angles), mx.float32), mx.array(np.sin(angles), mx.float32)
        one, two, rest = x[..., :half], x[..., half : self.dims], x[..., self.dims :]
        return mx.concatenate([one * cos - two * sin, two * cos + one * sin, rest], axis=-1)


@contextlib.contextmanager
def turning(model: LoadedModel, wanted: Request, length: int):
    """Makes mlx-lm's attention rotate by the positions of a request."""
    positions = slow_positions(wanted)
    first = max(max(p) for p in positions) + 1
    positions += [(first + n,) * 3 for n in range(length)]
    attentions = [layer.self_attn for layer in model.causal_lm.model.layers if "self_attn" in layer]
    ropes = [each.rope for each in attentions]
    try:
        for each in attentions:
            each.rope = SlowRope(positions, each.rope.dims)
        yield
    finally:
        for each, rope in zip(attentions, ropes):
            each.rope = rope


def rows_of(tower: VisionTower, rgb: np.ndarray) -> mx.array:
    """Returns the tower's rows [tokens, H] of an image, uint8 [height, width, 3]."""
    *_, last = tower.parts(rgb)
    return last[0]


def embedded(model: LoadedModel, wanted: Request) -> mx.array:
    """Returns the prompt's embeddings, with the tower's rows in the images' places."""
    inputs = model.causal_lm.model.embed_tokens(mx.array([wanted.prompt_token_ids]))
    for image in wanted.images.images if wanted.images else ():
        pixels = image.pixels
        rgb = np.frombuffer(pixels.rgb, np.uint8).reshape(pixels.height, pixels.width, 3)
        inputs[0, image.start : image.start + image.num_tokens] = rows_of(model.tower, rgb)
    return inputs


def slow_logits(model: LoadedModel, wanted: Request) -> mx.array:
    """Returns the logits after the prompt, [V]."""
    ids = mx.array([wanted.prompt_token_ids])
    with turning(model, wanted, 0):
        return model.causal_lm(ids, input_embeddings=embedded(model, wanted))[0, -1]


def slow_logprobs(model: LoadedModel, wanted: Request, answer: Sequence[int]) -> np.ndarray:
    """Returns logprobs after each token of prompt and answer, from one pass: float32 [N, V]."""
    inputs = embedded(model, wanted)
    if answer:
        after = model.causal_lm.model.embed_tokens(mx.array([answer]))
        inputs = mx.concatenate([inputs, after], axis=1)
    ids = mx.array([[*wanted.prompt_token_ids, *answer]])
    with turning(model, wanted, len(answer)):
        logits = model.causal_lm(ids, input_embeddings=inputs)[0]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def check_logprobs(model: LoadedModel, wanted: Request, outputs: Sequence[RequestOutput]) -> int:
    """Check logprobs of the answer, and of the prompt if requested; returns their number."""
    tokens = [token for each in outputs for token in each.token_ids]
    expected = slow_logprobs(model, wanted, tokens)
    start = len(wanted.prompt_token_ids)
    found = [(start + n, p) for n, p in enumerate(p for o in outputs for p in o.logprobs)]
    assert len(found) == (0 if wanted.sampling.top_logprobs is None else len(tokens))
    in_prompt = [p for each in outputs for p in each.prompt_logprobs]
    if wanted.sampling.prompt_logprobs is not None:
        assert len(in_prompt) == start - 1
    for place, got in [*enumerate(in_prompt, 1), *found]:
        row, token = expected[place - 1], [*wanted.prompt_token_ids, *tokens][place]
        values = [got.logprob, *(value for _, value in got.top)]
        best = np.sort(row)[::-1][: len(got.top)]
        assert np.abs(np.array(values) - [row[token], *best]).max() < 1e-3
    return len(found) + len(in_prompt)


def slow(model: LoadedModel, wanted: Request, vocab_size: int, stop_ids: Sequence[int]) -> Plain:
    """Decode with mlx-lm's modules, the prompt in one pass and the rest token by token.

    The noise is that of `Sampler`. Ids that stand for images are never drawn.
    """
    masks = PlainMask(wanted.grammar) if wanted.grammar is not None else None
    prompt, most = wanted.prompt_token_ids, wanted.sampling.max_tokens
    sampler = Sampler([wanted.sampling], [prompt], vocab_size, [stop_ids])
    cache = make_prompt_cache(model.model)
    tokens, gaps = [], []
    with turning(model, wanted, most):
        logits = model.causal_lm(
            mx.array([prompt]), cache, input_embeddings=embedded(model, wanted)
        )
        logits = logits[:, -1:]
        while True:
            logits[..., list(IMAGE_IDS.values())] = -mx.inf
            where = mx.array([[len(prompt) + len(tokens)]])
            mask = None if masks is None else masks.mask()
            before = mx.zeros((1, 1), dtype=mx.int32)
            scores = np.array(sampler.scores(logits, where, before, mask=mask)[0, 0])
            ranked = np.sort(scores.astype(np.float64))[::-1]
            tokens.append(int(np.argmax(scores)))
            gaps.append(float(ranked[0] - ranked[1]))
            if len(tokens) == most or tokens[-1] in stop_ids:
                return Plain(tuple(tokens), tuple(gaps))
            if masks is not None:
                masks.consume(tokens[-1])
            sampler.count_sampled(mx.array([[tokens[-1]]]), mx.array([1]), where)
            logits = model.causal_lm(mx.array([[tokens[-1]]]), cache)
