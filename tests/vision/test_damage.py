"""Damaged images: each is read or refused, in a process that a bad image can end."""

import base64
import io
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.text.sandbox import text_worker
from mlx_mtp.text.sandbox.text_worker import TextWorkers
from mlx_mtp.vision.images import ImageSizes, read_image
from tests.support.process import CHAT, running
from tests.vision.served import write_served_model

ROUNDS = 10
SIZES = ImageSizes(4, 2, least_pixels=64, most_pixels=1 << 14)


def saved(kind: str, **options) -> bytes:
    noise = np.random.default_rng(1).integers(0, 256, (40, 56, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, kind, **options)
    return buffer.getvalue()


WHOLE = [saved(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]


def damaged(draw: random.Random) -> bytes:
    data = bytearray(draw.choice(WHOLE))
    for _ in range(draw.randint(1, 8)):
        place = draw.randrange(len(data)) if draw.random() < 0.5 else draw.randrange(64)
        data[place] = draw.randrange(256)
    if draw.random() < 0.3:
        del data[draw.randrange(len(data)) :]
    return bytes(data)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_damaged_images_are_read_or_refused(count):
    draw, refused = random.Random(count), 0
    for _ in range(count):
        try:
            assert read_image(damaged(draw), SIZES).rgb
        except InvalidRequestError:
            refused += 1
    assert count // 10 < refused < count


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_helper_process_reads_as_this_one_does(tmp_path, monkeypatch, hangs):
    """A helper process that takes too long is ended, and the next image is read."""
    write_served_model(tmp_path)
    monkeypatch.setattr(text_worker, "NUM_WORKERS", 1)
    workers = TextWorkers(tmp_path, 10.0)
    try:
        for data in WHOLE:
            assert workers.read_image(data, SIZES) == read_image(data, SIZES)
        with pytest.raises(InvalidRequestError, match="is a PDF"):
            workers.read_image(b"%PDF-1.7", SIZES)
        if not hangs:
            return
        monkeypatch.setattr(text_worker, "MAX_IMAGE_SECONDS", 1e-3)
        with pytest.raises(InvalidRequestError, match=r"took more than 0\.001 s"):
            workers.read_image(saved("PNG"), ImageSizes(4, 2, 1 << 23, 1 << 24, 1 << 20))
        monkeypatch.undo()
        assert workers.read_image(WHOLE[0], SIZES) == read_image(WHOLE[0], SIZES)
    finally:
        workers.close()


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_damaged_images_through_a_server(tmp_path):
    """Each of 10,000 images is answered or refused, and the server's memory does not grow."""
    write_served_model(tmp_path)
    draw, statuses, held = random.Random(7), [], []
    flags = ("--dtype", "float32", "--calibration-seconds", "0", "--prefix-cache-size", "0")
    with running(str(tmp_path), *flags) as server, ThreadPoolExecutor(4) as pool:

        def status_of(data: bytes) -> int:
            url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            part = {"type": "image_url", "image_url": {"url": url}}
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
            return server.http.post(CHAT, json=body).status_code

        for _ in range(ROUNDS):
            statuses += pool.map(status_of, [damaged(draw) for _ in range(1000)])
            held.append(server.resident_bytes)
    assert set(statuses) == {200, 400}
    assert max(held) < held[0] + (300 << 20)
