"""From the bytes of a picture to pixels of the size that a vision tower takes.

The results are those of transformers' Qwen2VLImageProcessor on PIL: the same sizes, and PIL's
bicubic filter. Clients' bytes are decoded in a process of their own (`text.sandbox`).
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mlx_mtp.errors import InvalidRequestError, ModelError

PROCESSOR = "preprocessor_config.json"  # a model's file with its limits for images
MOST_BYTES = 32 << 20  # of an encoded image
MOST_PIXELS = 100_000_000
MOST_ASPECT = 200  # the longer side over the shorter one
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_KINDS = {  # what clients send in place of an image: a pattern of its first bytes
    "empty": rb"$",
    "a PDF": rb"\s*%pdf",
    "an SVG": rb"\s*<svg",
    "an XML or SVG text": rb"\s*<\?xml",
    "an address and no image": rb"\s*http",
    "HEIC or AVIF": rb".{4}ftyp(hei[cfx]|mif1|msf1|hevc|avif)",
}
_HALVES = [0.5, 0.5, 0.5]


class Pixels(NamedTuple):
    """A decoded image: RGB bytes, row by row, of a height and a width that the tower takes."""

    height: int
    width: int
    rgb: bytes
    digest: bytes  # hash of the size and the pixels, 16 bytes

    def array(self) -> np.ndarray:
        """Returns the pixels, uint8 [height, width, 3]."""
        return np.frombuffer(self.rgb, np.uint8).reshape(self.height, self.width, 3)

    @classmethod
    def of(cls, height: int, width: int, rgb: bytes) -> Pixels:
        whole = f"{height} {width} ".encode() + rgb
        return cls(height, width, rgb, hashlib.blake2b(whole, digest_size=16).digest())


@dataclass(frozen=True)
class ImageSizes:
    """The sizes of images that a model takes; `most_tokens` is the limit of tokens for an image."""

    patch: int = 16  # pixels of a patch's side
    merge: int = 2  # patches of a token's side
    least_pixels: int = 65536
    most_pixels: int = 16777216
    most_tokens: int = 4096
    token_id: int = 0  # id that stands for an image in a prompt

    @classmethod
    def of(
        cls, patch: int, merge: int, processor: dict[str, Any], most_tokens: int, token_id: int
    ) -> ImageSizes:
        """Returns sizes by a model's `PROCESSOR`; raises ModelError if they are not supported."""
        size = processor.get("size") or {}
        least = processor.get("min_pixels") or size.get("shortest_edge") or cls.least_pixels
        most = processor.get("max_pixels") or size.get("longest_edge") or cls.most_pixels
        if not all(type(n) is int and n > 0 for n in (least, most)) or least > most:
            raise ModelError(
                f"{PROCESSOR}: it limits images to {least!r:.40} to {most!r:.40} pixels."
            )
        for name in ("image_mean", "image_std"):
            if processor.get(name, _HALVES) != _HALVES:
                raise ModelError(f"{PROCESSOR}: {name} is {processor[name]!r:.60}, not {_HALVES}.")
        return cls(patch, merge, least, most, most_tokens, token_id)

    @property
    def token(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    def for_detail(self, detail: str) -> ImageSizes:
        """Returns the sizes for OpenAI's `detail`: "low" limits an image to 256 tokens."""
        return replace(self, most_tokens=min(self.most_tokens, 256)) if detail == "low" else self

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width, multiples of `token`, to which an image is scaled."""
        side, most = self.token, min(self.most_pixels, self.most_tokens * self.token**2)
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(1, int(n / shrink / side)) for n in (height, width))
        elif rows * columns * side**2 < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (height * width))
            rows, columns = (math.ceil(n * grow / side) for n in (height, width))
        return rows * side, columns * side


def read_image(data: bytes, sizes: ImageSizes) -> Pixels:
    """Decode and scale an image, after checks of its header; raises InvalidRequestError."""
    if len(data) > MOST_BYTES:
        raise _wrong(f"has {len(data):,} bytes; at most {MOST_BYTES:,} are allowed")
    try:
        # PIL warns of large images, which are bounded here.
        ignored = warnings.catch_warnings(action="ignore")
        with ignored, Image.open(BytesIO(data), formats=_FORMATS) as opened:
            turned = _decoded(opened)
    except InvalidRequestError:
        raise
    except Image.DecompressionBombError:
        raise _wrong(f"is too large; at most {MOST_PIXELS:,} pixels are allowed") from None
    except UnidentifiedImageError:
        kinds = (kind for kind, begun in _KINDS.items() if re.match(begun, data[:256], re.I | re.S))
        kind = next(kinds, "no image that can be read")
        raise _wrong(f"is {kind}; this server takes PNG, JPEG, WebP and GIF") from None
    except Exception as error:
        fault = " ".join(str(error).split())
        raise _wrong(f"is damaged or cut off: {fault:.200}") from None
    height, width = sizes.fitted(turned.height, turned.width)
    tokens = height * width // sizes.token**2
    if tokens > sizes.most_tokens:
        shape = f"{turned.width} x {turned.height} pixels"
        most = f"{sizes.most_tokens:,}, the limit of --max-image-tokens"
        raise _wrong(f"of {shape} takes {tokens:,} tokens, more than {most}")
    rgb = turned.resize((width, height), Image.Resampling.BICUBIC).tobytes()
    return Pixels.of(height, width, rgb)


def _decoded(image: Image.Image) -> Image.Image:
    """Returns the first frame as RGB, turned by its EXIF orientation, on white if transparent."""
    width, height = image.size
    if width < 1 or height < 1:
        raise _wrong("has no pixels")
    if width * height > MOST_PIXELS:
        raise _wrong(f"has {width} x {height} pixels; at most {MOST_PIXELS:,} are allowed")
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise _wrong(f"is {width} x {height} pixels; sides of 200:1 are the limit")
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits; PIL's own conversion would clip them
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray((np.clip(values, 0, 0xFFFF) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _wrong(fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"The image {fault}.")
