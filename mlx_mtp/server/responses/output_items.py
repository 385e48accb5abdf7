"""The output items of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_mtp.server.choice import TokenInfo
from mlx_mtp.server.openai.writer import TokenNames, logprob_entries
from mlx_mtp.server.seal import sealed
from mlx_mtp.server.whole import Part, ReasoningPart, TextPart
from mlx_mtp.server.writer import new_id


class Items:
    """Makes output items, as the request wants them.

    Args:
        names: names tokens, for logprobs.
        with_logprobs: they were asked for.
        as_summary: reasoning is told as its own summary, which more clients show.
        with_seal: reasoning is also told in the form that clients send back unread.
    """

    def __init__(
        self, names: TokenNames, *, with_logprobs: bool, as_summary: bool, with_seal: bool
    ) -> None:
        self._names = names
        self._with_logprobs = with_logprobs
        self.as_summary = as_summary
        self._with_seal = with_seal

    def of(self, part: Part, status: str) -> dict[str, Any]:
        """The item of a part of a whole answer."""
        if isinstance(part, TextPart):
            return self.message(new_id("msg"), status, [self.text(part.text, part.tokens)])
        if isinstance(part, ReasoningPart):
            return self.reasoning(new_id("rs"), status, part.text)
        return self.call(new_id("fc"), status, new_id("call"), part.name, part.arguments)

    def message(self, item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Some text of the answer proper."""
        fields = {"id": item_id, "type": "message", "role": "assistant"}
        return {**fields, "status": status, "content": content}

    def text(self, text: str, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """The one part of a message."""
        logprobs = self.logprobs(tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
        """Those of some tokens; none if they weren't asked for."""
        return logprob_entries(self._names, tokens) if self._with_logprobs else []

    def reasoning(self, item_id: str, status: str, text: str) -> dict[str, Any]:
        """What the model thought."""
        item: dict[str, Any] = {"id": item_id, "type": "reasoning", "status": status, "summary": []}
        if text:
            item["summary" if self.as_summary else "content"] = [self.thought(text)]
        if self._with_seal:
            item["encrypted_content"] = sealed(text)
        return item

    def thought(self, text: str) -> dict[str, Any]:
        """The one part of a reasoning item."""
        return {"type": "summary_text" if self.as_summary else "reasoning_text", "text": text}

    def call(
        self, item_id: str, status: str, call_id: str, name: str, arguments: str
    ) -> dict[str, Any]:
        """A function call."""
        fields = {"id": item_id, "type": "function_call", "status": status}
        return {**fields, "call_id": call_id, "name": name, "arguments": arguments}
