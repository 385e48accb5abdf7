"""Images of any kind become the pixels that a viewer shows; other files are refused by name."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from mlx_mtp.errors import InvalidRequestError, ModelError
from mlx_mtp.vision.images import ImageSizes, read_image

# A token covers 8 x 8 pixels; images are scaled only in tests of scaling.
SIZES = ImageSizes(patch=4, merge=2, least_pixels=64, most_pixels=1 << 20, most_tokens=64)
RGB = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(data: bytes, sizes: ImageSizes = SIZES) -> np.ndarray:
    found = read_image(data, sizes)
    return np.frombuffer(found.rgb, np.uint8).reshape(found.height, found.width, 3)


GREY = RGB[..., 0]
ALPHA = np.where(GREY[..., None] % 2, 255, 0).astype(np.uint8)
PALETTE = Image.fromarray(RGB).quantize(16)
ON_WHITE = np.where(ALPHA > 0, RGB, 255)


@pytest.mark.parametrize(
    ("data", "expected"),
    {
        "png": (saved(Image.fromarray(RGB)), RGB),
        "webp": (saved(Image.fromarray(RGB), "WEBP", lossless=True), RGB),
        "grey": (saved(Image.fromarray(GREY)), np.stack([GREY] * 3, -1)),
        "1 bit": (
            saved(Image.fromarray(GREY > 127)),
            np.stack([np.where(GREY > 127, 255, 0)] * 3, -1),
        ),
        "16 bit": (
            saved(Image.fromarray(GREY.astype(np.uint16) * 257)),
            np.stack([GREY] * 3, -1),
        ),
        "alpha": (saved(Image.fromarray(np.concatenate([RGB, ALPHA], -1))), ON_WHITE),
        "grey and alpha": (
            saved(Image.fromarray(np.concatenate([GREY[..., None], ALPHA], -1), "LA")),
            np.where(ALPHA > 0, GREY[..., None], 255).repeat(3, -1),
        ),
        "palette": (saved(PALETTE), np.asarray(PALETTE.convert("RGB"))),
        "transparent colour": (
            saved(PALETTE, transparency=3),
            np.where(
                (np.asarray(PALETTE) == 3)[..., None], 255, np.asarray(PALETTE.convert("RGB"))
            ),
        ),
        "first frame": (
            saved(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(180)]),
            np.asarray(PALETTE.convert("RGB")),
        ),
    }.values(),
)
def test_modes(data, expected):
    assert np.array_equal(pixels(data), expected)


def test_cmyk_and_jpeg():
    """JPEGs in CMYK, RGB and gray are decoded as PIL does."""
    for mode in ("CMYK", "RGB", "L"):
        data = saved(Image.fromarray(RGB).convert(mode), "JPEG", quality=90)
        assert np.array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    upright = {
        1: RGB,
        2: RGB[:, ::-1],
        3: RGB[::-1, ::-1],
        4: RGB[::-1],
        5: RGB.swapaxes(0, 1),
        6: RGB[::-1].swapaxes(0, 1),
        7: RGB[::-1, ::-1].swapaxes(0, 1),
        8: RGB[:, ::-1].swapaxes(0, 1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = pixels(saved(Image.fromarray(RGB), exif=exif.tobytes()))
    assert np.array_equal(found, upright[orientation])


def test_sizes():
    """Fitted sizes are multiples of a token, within the limits."""
    published = ImageSizes()
    for height, width in ((1, 1), (17, 13), (480, 640), (3000, 4000), (1, 200), (9, 1700)):
        rows, columns = published.fitted(height, width)
        assert rows % 32 == columns % 32 == 0
        assert 65536 <= rows * columns <= 4096 * 1024
    low = published.for_detail("low")
    assert low.fitted(3000, 4000) == (416, 576) and published.for_detail("high") == published


def header_of(width: int, height: int) -> bytes:
    """Returns the beginning of a PNG."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    begun = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    return begun + struct.pack(">I", zlib.crc32(chunk)) + struct.pack(">I", 9) + b"IDAT"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"%PDF-1.7 abc", "is a PDF; this server takes PNG, JPEG, WebP and GIF"),
        (b"  <svg xmlns='x'/>", "is an SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "is HEIC or AVIF"),
        (b"hello", "is no image that can be read"),
        (header_of(30000, 30000), "at most 100,000,000 pixels"),
        (header_of(11000, 11000), "11000 x 11000 pixels; at most 100,000,000"),
        (saved(Image.new("RGB", (201, 1))), "201 x 1 pixels; sides of 200:1"),
        (saved(Image.fromarray(RGB))[:-40], "is damaged or cut off"),
        (saved(Image.fromarray(RGB), "JPEG")[:-100], "is damaged or cut off"),
        (saved(Image.new("RGB", (1600, 8))), "takes 113 tokens, more than 64"),
    ],
    ids=range(11),
)
def test_refusals(data, words):
    with pytest.raises(InvalidRequestError, match=words.replace("(", r"\(")):
        read_image(data, SIZES)


def test_limits_of_the_model():
    size = {"size": {"shortest_edge": 100, "longest_edge": 900}}
    assert ImageSizes.of(16, 2, size, 4096, 7) == ImageSizes(16, 2, 100, 900, 4096, 7)
    for wrong in ({"min_pixels": -1}, {"size": {"longest_edge": "x"}}, {"image_mean": [0, 0, 0]}):
        with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
            ImageSizes.of(16, 2, wrong, 4096, 7)
