"""Puts the images of a chat into its prompt, in the places that the template made for them."""

from collections.abc import Iterable

from mlx_mtp.engine.request import prompt_too_long
from mlx_mtp.errors import InvalidRequestError, UnsupportedParameterError
from mlx_mtp.server.generation.pictures import Picture, parts_of
from mlx_mtp.text.sandbox.text_worker import TextWorkers
from mlx_mtp.vision.images import ImageSizes as ImageSizes
from mlx_mtp.vision.images import read_image, sizes_for_detail
from mlx_mtp.vision.placed import PlacedImage, PromptImages

TokenIds = tuple[int, ...]
Images = PromptImages | None
_NAMES = frozenset({"<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"})


class Sight:
    """What a model sees, at most `most` images of a request; nothing without `sizes`."""

    def __init__(self, sizes: ImageSizes | None, most: int, workers: TextWorkers | None) -> None:
        self._sizes, self._most = sizes, most
        self._read = read_image if workers is None else workers.read_image

    def names(self, added_tokens: Iterable[str]) -> list[str]:
        """The tokens that stand for images, which no client's text may become."""
        return [name for name in added_tokens if name in _NAMES and self._sizes is not None]

    def place(
        self, contents: Iterable[str], token_ids: TokenIds, limit: int
    ) -> tuple[TokenIds, Images]:
        """The prompt of messages with these contents; RequestError if an image can't be seen."""
        found = [
            (number, part)
            for number, content in enumerate(contents)
            for part in parts_of(content)
            if isinstance(part, Picture)
        ]
        if not found:
            return token_ids, None
        if (sizes := self._sizes) is None:
            raise UnsupportedParameterError(
                f"Message {found[0][0]} has an image, but this model takes text only: it has no "
                "vision tower, or the server runs with --no-vision or on several ranks.",
                param="messages",
            )
        if len(found) > self._most:
            raise _wrong(f"The messages have {len(found)} images; --max-images is {self._most}.")
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
                pixels = self._read(picture.content, sizes_for_detail(sizes, picture.detail))
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
