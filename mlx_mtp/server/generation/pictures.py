"""Images in a conversation's texts: from the APIs' parts, through the template, to the prompt.

A message's content stays one text. An image is a span of it between two copies of a mark, which is
drawn at random when the process starts, so no client can write it. Code that joins, stores or folds
texts needs no special case for images.
"""

import base64
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mlx_mtp.engine.request import prompt_too_long
from mlx_mtp.errors import InvalidRequestError, UnsupportedParameterError
from mlx_mtp.text.sandbox.text_worker import TextWorkers
from mlx_mtp.vision.images import ImageSizes as ImageSizes
from mlx_mtp.vision.images import read_image
from mlx_mtp.vision.placed import PlacedImage, PromptImages

Images = PromptImages | None
_NAMES = frozenset({"<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"})
_MARK = f"[image {secrets.token_hex(16)}]"
_TYPES = ("", "image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_DETAILS = ("low", "high", "auto", "original")
_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.IGNORECASE)
# The types of image parts in chat completions, responses and messages.
PARTS = frozenset({"image_url", "input_image", "image"})
_SHOWN = 60  # characters of a wrong value in an error


class Picture(NamedTuple):
    """An image as a client sent it."""

    data: str  # base64
    detail: str


Found = tuple[int, Picture]  # a message's index, and an image in the message


def as_text(data: str, detail: str = "auto") -> str:
    """Returns the span of text that stands for an image in base64."""
    return f"{_MARK}{detail},{data}{_MARK}"


def from_part(part: dict[str, Any]) -> str:
    """Returns the span of text for a part of a type in `PARTS`; raises ValueError if invalid."""
    if part.get("type") == "image":
        source = part.get("source")
        if not isinstance(source, dict) or source.get("type") != "base64":
            raise ValueError(
                "an image's source must be of type base64: nothing is fetched from a URL"
            )
        if not isinstance(data := source.get("data"), str):
            raise ValueError("an image's source needs data, a text in base64")
        return _from_url(f"data:{source.get('media_type')!s:.99};base64,{data}")
    if part.get("file_id") is not None:
        raise ValueError("this server stores no files; send image_url with a data URL")
    url = part.get("image_url")
    given = url if isinstance(url, dict) else part | {"url": url}
    return _from_url(given.get("url"), given.get("detail"))


def _from_url(url: object, detail: object = None) -> str:
    if not isinstance(url, str):
        raise ValueError("an image needs the text of a data URL")
    match = _DATA_URL.match(url, 0, 256)
    if match is None:
        raise ValueError(
            f"{json.dumps(url[:_SHOWN])} is not a data URL: this server fetches nothing from a "
            "network; send the image itself, as data:image/png;base64 and so on"
        )
    if match[1].lower() not in _TYPES:
        shown, taken = json.dumps(match[1])[:_SHOWN], "PNG, JPEG, WebP and GIF images"
        raise ValueError(f"the media type {shown} is not taken; this server takes {taken}")
    if "base64" not in match[2].lower().split(";"):
        raise ValueError("a data URL of an image must be in base64")
    if detail not in (None, *_DETAILS):
        raise ValueError(f"detail must be one of {', '.join(_DETAILS)}")
    return as_text(url[match.end() :], str(detail or "auto"))


def texts_and_pictures(text: str) -> Iterator[str | Picture]:
    """Yields the images in a text and the texts between them, in order, without empty texts."""
    for number, stretch in enumerate(text.split(_MARK)):
        if number % 2:
            detail, _, data = stretch.partition(",")
            yield Picture(data, detail)
        elif stretch:
            yield stretch


def has_images(text: str) -> bool:
    """Returns True if a text has images."""
    return _MARK in text


def listed(text: str, kinds: tuple[str, str]) -> list[dict[str, Any]] | str:
    """Returns a text as an API lists it: with images as parts of these types, texts and images."""
    if not has_images(text):
        return text
    parts: list[dict[str, Any]] = []
    for part in texts_and_pictures(text):
        if isinstance(part, str):
            parts.append({"type": kinds[0], "text": part})
        else:
            url = f"data:;base64,{part.data}"
            nested = {"url": url} if kinds[1] == "image_url" else url
            parts.append({"type": kinds[1], "image_url": nested})
    return parts


class Sight:
    """Finds a request's images, at most `most`; if `sizes` is None, the model takes none."""

    def __init__(self, sizes: ImageSizes | None, most: int, workers: TextWorkers | None) -> None:
        self._sizes, self._most = sizes, most
        self._read = read_image if workers is None else workers.read_image

    def names(self, added_tokens: Iterable[str]) -> list[str]:
        """Returns the names of the tokens for images, which clients' text must not turn into."""
        return [name for name in added_tokens if name in _NAMES and self._sizes is not None]

    def find(self, contents: Iterable[str]) -> list[Found]:
        """Returns the images in the messages; raises RequestError if there are too many."""
        found = [
            (number, part)
            for number, content in enumerate(contents)
            for part in texts_and_pictures(content)
            if isinstance(part, Picture)
        ]
        if found and self._sizes is None:
            raise UnsupportedParameterError(
                f"Message {found[0][0]} has an image, but this model takes text only: it has no "
                "vision tower, or the server runs with --no-vision.",
                param="messages",
            )
        if len(found) > self._most:
            raise _wrong(f"The messages have {len(found)} images; --max-images is {self._most}.")
        return found

    def place(
        self, found: Sequence[Found], token_ids: tuple[int, ...], limit: int
    ) -> tuple[tuple[int, ...], Images]:
        """Returns a prompt with its images; raises RequestError if one is invalid or too large."""
        if (sizes := self._sizes) is None:
            return token_ids, None
        places = [place for place, token in enumerate(token_ids) if token == sizes.token_id]
        if len(places) != len(found):
            raise _wrong(
                f"The chat template made {len(places)} places for {len(found)} images: it takes "
                "none in some of these messages."
            )
        prompt: list[int] = []
        placed, after = [], 0
        for place, (number, picture) in zip(places, found):
            prompt += token_ids[after:place]
            after = place + 1
            try:
                data = base64.b64decode("".join(picture.data.split()), validate=True)
            except ValueError as error:
                raise _wrong(f"Message {number}: The image is not valid base64: {error}.") from None
            try:
                pixels = self._read(data, sizes.for_detail(picture.detail))
            except InvalidRequestError as error:
                raise _wrong(f"Message {number}: {error}") from None
            rows, columns = pixels.height // sizes.token, pixels.width // sizes.token
            placed.append(PlacedImage(len(prompt), rows, columns, pixels))
            prompt += [sizes.token_id] * (rows * columns)
            if (count := len(prompt) + len(token_ids) - after) > limit:
                raise prompt_too_long(count, limit)
        prompt += token_ids[after:]
        return tuple(prompt), PromptImages(placed, len(prompt))


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")
