"""One measured answer: when its tokens came, and how many came at a time.

Definitions, with t0 the moment before the request is sent:

    chunk               what one read of the connection brought, if it brought text
    TTFT                time of the first chunk - t0
    chunk gap           time between two chunks
    inter-token latency chunk gap / tokens in the later chunk, counted once for each of its tokens
    decoding rate       tokens after the first chunk / time after the first chunk

A chunk may hold several tokens: with speculative decoding a step gives a reader several at once.
How many is known where the server says it (`Split`); the whole is the server's `usage` either way.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_mtp.bench.chunks import Timings, Usage, parse_chunk
from mlx_mtp.bench.sse import DONE, Read, timed_events
from mlx_mtp.errors import BenchError


class Split(enum.StrEnum):
    """How the tokens of each chunk are known, from the best to the worst."""

    TOLD = "told"
    """The server counts in each chunk, or the engine was asked itself."""
    SINGLE = "single"
    """One token a chunk: there are as many chunks as tokens (the end's token has no text)."""
    TEXT = "text"
    """Estimated: the tokens are shared out by the length of each chunk's text."""
    CHUNKS = "chunks"
    """The server sends no usage: chunks are counted and called tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Times are seconds of the client's clock.

    Args:
        sent: before the request was sent.
        ended: when the last event came.
        times: of each chunk, increasing.
        tokens: in each chunk; not whole numbers where they are estimated.
        num_tokens: of the answer, those without text included.
        split: how `tokens` is known.
        num_events: stream events with text; several may have come in one read.
        prompt_tokens: None if the server doesn't say.
        num_drafts: draft tokens verified, where the server tells.
        num_accepted: of these.
        retries: connections that the server refused before it took this one.
    """

    sent: float
    ended: float
    times: tuple[float, ...]
    tokens: tuple[float, ...]
    num_tokens: int
    split: Split
    num_events: int
    prompt_tokens: int | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    retries: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to the first token; None for an answer without text."""
        return self.times[0] - self.sent if self.times else None

    @property
    def gaps(self) -> tuple[float, ...]:
        """Between chunks."""
        return tuple(b - a for a, b in zip(self.times, self.times[1:]))

    @property
    def decoding_rate(self) -> float | None:
        """Tokens per second after the first chunk; None if nothing came after it."""
        if len(self.times) < 2:
            return None
        return sum(self.tokens[1:]) / (self.times[-1] - self.times[0])


@dataclass
class _Parts:
    """What an answer's events said."""

    times: list[float]
    texts: list[str]
    running: list[int | None]
    ended: float
    usage: Usage | None = None
    timings: Timings | None = None
    finish_reason: str | None = None
    done: bool = False


def parse_answer(sent: float, reads: Iterable[Read], retries: int = 0) -> Answer:
    """Read an answer's stream.

    Args:
        sent: before the request was sent.
        reads: what came, and when.
        retries: as in `Answer`.

    Raises:
        BenchError: it holds an error, is no stream of chat completion chunks, or was cut short.
    """
    try:
        parts = _collect(sent, reads)
    except UnicodeDecodeError:
        raise BenchError("the stream is not UTF-8.") from None
    if not parts.done and parts.finish_reason is None:
        raise BenchError(
            f"an answer was cut off after {len(parts.texts)} chunks: the server died or closed "
            "the connection."
        )
    if parts.texts and parts.usage is not None and parts.usage.completion_tokens < 1:
        parts.usage = None
    usage, timings = parts.usage, parts.timings or Timings()
    tokens, split = _tokens(parts)
    times, tokens = _merged(parts.times, tokens)
    return Answer(
        sent=sent,
        ended=parts.ended,
        times=tuple(times),
        tokens=tuple(tokens),
        num_tokens=len(parts.texts) if usage is None else usage.completion_tokens,
        split=split,
        num_events=len(parts.texts),
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        num_drafts=timings.draft_n,
        num_accepted=timings.draft_n_accepted,
        retries=retries,
    )


def _collect(sent: float, reads: Iterable[Read]) -> _Parts:
    parts = _Parts([], [], [], ended=sent)
    for at, data in timed_events(reads):
        parts.ended = at
        if data == DONE:
            parts.done = True
            break
        chunk = parse_chunk(data)
        parts.usage = chunk.usage or parts.usage
        parts.timings = chunk.timings or parts.timings
        parts.finish_reason = chunk.finish_reason or parts.finish_reason
        if chunk.text:
            parts.times.append(at)
            parts.texts.append(chunk.text)
            parts.running.append(chunk.usage.completion_tokens if chunk.usage else None)
    return parts


def _tokens(parts: _Parts) -> tuple[list[float], Split]:
    """Tokens of each event with text, and how that is known."""
    count = len(parts.texts)
    if parts.usage is None:
        return [1.0] * count, Split.CHUNKS
    told = [n for n in parts.running if n is not None]
    if count and len(told) == count:
        steps = [float(b - a) for a, b in zip([0, *told], told)]
        # A chunk without a token of its own holds text that was kept back.
        if steps[0] > 0 and min(steps) >= 0:
            return steps, Split.TOLD
    total = parts.usage.completion_tokens
    if total in (count, count + 1):
        return [1.0] * count, Split.SINGLE
    # The token that stops an answer has no text.
    with_text = total - (parts.finish_reason == "stop")
    return _shared_out(with_text, [len(text) for text in parts.texts]), Split.TEXT


def _shared_out(total: int, lengths: Sequence[int]) -> list[float]:
    """One token for each event, and what is left in proportion to the lengths of their texts."""
    left = total - len(lengths)
    if left < 0:
        return [total / len(lengths)] * len(lengths)
    characters = sum(lengths)
    return [1.0 + left * length / characters for length in lengths]


def _merged(times: Sequence[float], tokens: Sequence[float]) -> tuple[list[float], list[float]]:
    """Chunks out of events: those that one read brought are one, and each has a token."""
    merged: tuple[list[float], list[float]] = ([], [])
    for at, count in zip(times, tokens, strict=True):
        if merged[0] and merged[0][-1] == at:
            merged[1][-1] += count
        elif count:
            merged[0].append(at)
            merged[1].append(count)
    return merged
