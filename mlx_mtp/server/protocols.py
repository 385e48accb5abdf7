"""What the server needs of an engine. `engine.Engine` has it; so has the tests' fake one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mlx_mtp.config import DraftTokens
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.engine.stats import EngineStats


class EngineInfoLike(Protocol):
    """What never changes while an engine lives."""

    @property
    def vocab_size(self) -> int:
        """The tokenizer's ids are below this."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """The ids that end an answer."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def num_draft_tokens(self) -> DraftTokens:
        """Drafts per step where a request doesn't say; 0 when MTP is off."""

    @property
    def mtp_enabled(self) -> bool:
        """There is a source of drafts."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are computed at once."""


class EngineLike(Protocol):
    """Token ids in, tokens out, on a thread of its own."""

    @property
    def info(self) -> EngineInfoLike:
        """What never changes."""

    @property
    def healthy(self) -> bool:
        """The engine takes requests."""

    @property
    def unhealthy_reason(self) -> str | None:
        """Why it doesn't and never will again; None while it does."""

    @property
    def hang_reason(self) -> str | None:
        """Why the engine is taken to hang; None while it works. It may recover."""

    def start(self, deliver: Callable[[Sequence[RequestOutput]], None]) -> None:
        """Begin; `deliver` is called on the engine's thread, once per step."""

    def submit(self, request: Request) -> None:
        """Queue a request, or raise a RequestError or an EngineError."""

    def cancel(self, request_id: str) -> None:
        """Free a request's row; unknown ids are ignored."""

    def stats(self) -> EngineStats:
        """Totals and gauges."""

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread; every request still open ends with an error.

        Args:
            timeout: seconds to wait for that; None: as long as it takes.

        Returns:
            It has ended; False: it hangs.
        """
