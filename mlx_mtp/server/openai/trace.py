"""What each step of a stream drafted, accepted and drew, as `mtp: {"trace": true}` asks for it."""

import codecs
from collections.abc import Callable
from typing import Any

from mlx_mtp.engine.request import RequestOutput


class Trace:
    """One choice's; the texts of its tokens, joined, are the answer as the model wrote it."""

    def __init__(self, token_bytes: Callable[[int], bytes], steps: list[RequestOutput]) -> None:
        self._token_bytes, self._steps = token_bytes, steps
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self) -> list[dict[str, Any]]:
        """What is new since the last call."""
        steps = list(map(self._step, self._steps))
        self._steps.clear()
        return steps

    def _step(self, output: RequestOutput) -> dict[str, Any]:
        # Drafts follow what came before the step, which may end within a character.
        before = self._utf8.getstate()
        drafts = [{**self._token(d.token_id), "source": d.source} for d in output.drafts or ()]
        self._utf8.setstate(before)
        tokens = list(map(self._token, output.token_ids))
        accepted = min(output.num_accepted_tokens, len(tokens))
        return {"tokens": tokens, "drafts": drafts, "num_accepted": accepted}

    def _token(self, token_id: int) -> dict[str, Any]:
        return {"id": token_id, "text": self._utf8.decode(self._token_bytes(token_id))}
