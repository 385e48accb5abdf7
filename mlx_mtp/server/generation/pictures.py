"""Images in a conversation's texts, from the APIs' parts to a template's.

A message's content stays one text. An image is a stretch of it between two marks, which are drawn
when the process starts, so that no client can write one: whatever joins, stores or folds texts
needs no second case.
"""

import base64
import binascii
import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from mlx_mtp.errors import InvalidRequestError

_MARK = f"[image {secrets.token_hex(16)}]"
_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_TAKEN = "PNG, JPEG, WebP and GIF images"
DETAILS = ("low", "high", "auto", "original")
_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.IGNORECASE)
PARTS = frozenset({"image_url", "input_image", "image"})
"""The types of parts that are images: of chat completions, responses and messages."""
_SHOWN = 60  # characters of a wrong value


class Picture(NamedTuple):
    """An image as a client sent it."""

    data: str  # base64
    detail: str

    @property
    def content(self) -> bytes:
        """The file's bytes; InvalidRequestError if they are no base64."""
        try:
            return base64.b64decode("".join(self.data.split()), validate=True)
        except binascii.Error as error:
            raise InvalidRequestError(f"The image is no base64: {error}.") from None

    @property
    def url(self) -> str:
        return f"data:;base64,{self.data}"


def as_text(data: str, detail: str | None = None) -> str:
    """An image as a stretch of a text; ValueError says what is wrong with its data."""
    if not data:
        raise ValueError("the image is empty")
    if detail not in (None, *DETAILS):
        raise ValueError(f"detail must be one of {', '.join(DETAILS)}")
    return f"{_MARK}{detail or 'auto'},{data}{_MARK}"


def from_url(url: object, detail: object = None) -> str:
    """`as_text` of a data URL; ValueError if it is none, or of another kind."""
    if not isinstance(url, str):
        raise ValueError("an image needs the text of a data URL")
    match = _DATA_URL.match(url, 0, 256)
    if match is None:
        raise ValueError(
            f"{json.dumps(url[:_SHOWN])} is no data URL: this server fetches nothing from a "
            "network; send data:image/png;base64,..."
        )
    check_media_type(match[1])
    if "base64" not in match[2].lower().split(";"):
        raise ValueError("a data URL of an image must be in base64")
    return as_text(url[match.end() :], detail if detail is None else str(detail))


def check_media_type(media_type: object) -> None:
    """ValueError for a type that is no image that this server takes."""
    if not isinstance(media_type, str) or (media_type and media_type.lower() not in _TYPES):
        shown = json.dumps(media_type)[:_SHOWN]
        raise ValueError(f"the media type {shown} is not taken; this server takes {_TAKEN}")


def from_part(part: dict[str, Any]) -> str:
    """`as_text` of a part of one of the types `PARTS`; ValueError says what is wrong with it."""
    kind, source = part.get("type"), part.get("source")
    if kind == "image_url":
        inner = part.get("image_url")
        inner = inner if isinstance(inner, dict) else {"url": inner}
        return from_url(inner.get("url"), inner.get("detail"))
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise ValueError("this server stores no files; send image_url with a data URL")
        return from_url(part.get("image_url"), part.get("detail"))
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise ValueError("an image's source must be of type base64: nothing is fetched from a URL")
    check_media_type(source.get("media_type"))
    data = source.get("data")
    if not isinstance(data, str):
        raise ValueError("an image's source needs data, a text in base64")
    return as_text(data)


def parts_of(text: str) -> Iterator[str | Picture]:
    """The texts and images that a text is made of, in order; empty texts are left out."""
    for number, stretch in enumerate(text.split(_MARK)):
        if number % 2:
            detail, _, data = stretch.partition(",")
            yield Picture(data, detail)
        elif stretch:
            yield stretch


def has_images(text: str) -> bool:
    """Whether a text has images."""
    return _MARK in text


def listed(text: str, kinds: tuple[str, str]) -> list[dict[str, Any]] | str:
    """A text as an API lists it; with images it is parts of these two types."""
    if not has_images(text):
        return text
    return [
        {"type": kinds[0], "text": part}
        if isinstance(part, str)
        else {
            "type": kinds[1],
            "image_url": part.url if kinds[1] == "input_image" else {"url": part.url},
        }
        for part in parts_of(text)
    ]
