"""One answer of a server or an engine: when its tokens came, and how many came at a time.

A chunk is what one read of the connection returned, if it contained text. It is parsed when the
answer has ended: a server may share the client's machine.
"""

import enum
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_mtp.errors import UNEXPECTED, BenchError

Read = tuple[float, bytes]  # When bytes were read, by the client's clock, and the bytes.
# By the fields of `Answer`; timings are as llama.cpp has them.
_COUNTS = {
    "num_tokens": ("usage", "completion_tokens"),
    "prompt_tokens": ("usage", "prompt_tokens"),
    "num_drafts": ("timings", "draft_n"),
    "num_accepted": ("timings", "draft_n_accepted"),
}


_MOST = 1 << 53  # A larger count is none.


class Split(enum.StrEnum):
    """How the tokens of each chunk are known, best first."""

    TOLD = "told"  # The server counts in each chunk, or an engine was asked directly.
    SINGLE = "single"  # There are as many chunks as tokens; a last one may have no text.
    TEXT = "text"  # Estimated: the usage is divided by the length of each chunk's text.
    CHUNKS = "chunks"  # The server sends no usage: chunks are counted as tokens.


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Times are seconds of the client's clock."""

    sent: float  # Before the request was sent.
    ended: float  # When the last event came.
    times: tuple[float, ...]  # Of each chunk, increasing.
    tokens: tuple[float, ...]  # In each chunk; not whole numbers where they are estimated.
    num_tokens: int  # Of the answer, those without text included.
    split: Split
    num_events: int  # Stream events with text, of which one read may return several.
    prompt_tokens: int | None = None  # None if the server doesn't say.
    num_drafts: int = 0  # Draft tokens verified, as far as the server says.
    num_accepted: int = 0
    retries: int = 0  # Connections that were refused before one was accepted.
    # Drafts verified and accepted by source and position, where the server is mlx-mtp.
    drafts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    accepted: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.times, self.times[1:]))

    @property
    def decoding_rate(self) -> float | None:
        if len(self.times) < 2:
            return None
        return sum(self.tokens[1:]) / (self.times[-1] - self.times[0])


def parse_answer(sent: float, reads: Sequence[Read], retries: int = 0) -> Answer:
    """Parse the stream of an answer; raises BenchError for an error in it, and if it was cut."""
    ended, data, last = sent, "", dict[str, Any]()
    events: list[tuple[float, dict[str, Any]]] = []
    for ended, data in timed_events(reads):
        if data == "[DONE]":
            break
        found = _parse_chunk(data)
        last |= found
        if found["text"]:
            events.append((ended, found))
    if data != "[DONE]" and "finish_reason" not in last:
        raise BenchError(
            f"an answer was cut off after {len(events)} chunks: the server died or closed the "
            "connection."
        )
    if events and last.get("num_tokens") == 0:
        del last["num_tokens"]  # There is text, so this is no count.
    tokens, split = _token_counts([event for _, event in events], last)
    chunks: dict[float, float] = {}  # The events of one read are one chunk.
    for (at, _), count in zip(events, tokens, strict=True):
        chunks[at] = chunks.get(at, 0.0) + count
    chunks = {at: count for at, count in chunks.items() if count}
    told = (*_COUNTS, "drafts", "accepted")
    counts = {"num_tokens": len(events)} | {k: last[k] for k in told if k in last}
    return Answer(
        *(sent, ended, tuple(chunks), tuple(chunks.values())),
        **{"split": split, "num_events": len(events), "retries": retries, **counts},
    )


def timed_events(reads: Iterable[Read]) -> Iterator[tuple[float, str]]:
    """The data of each server-sent event, with the time of the read that completed it."""
    rest, data = b"", list[bytes]()
    for at, received in _with_end(reads):
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                try:
                    yield at, b"\n".join(data).decode()
                except UnicodeDecodeError:
                    raise BenchError("the stream is not UTF-8.") from None
                data = []


def _with_end(reads: Iterable[Read]) -> Iterator[Read]:
    at = None
    for at, received in reads:
        yield at, received
    if at is not None:
        yield at, b"\n\n"  # The end of the stream completes its last event.


def _parse_chunk(data: str) -> dict[str, Any]:
    """The text of a chunk, and its finish reason and counts if it has them."""
    found: dict[str, Any] = {"text": ""}
    try:
        chunk = json.loads(data)
        error = chunk.get("error")
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            parts = [delta.get(key) for key in ("reasoning_content", "reasoning", "content")]
            for call in delta.get("tool_calls") or []:
                function = call.get("function") or {}
                parts += [function.get("name"), function.get("arguments")]
            found["text"] += "".join(part for part in parts if part)
            if choice.get("finish_reason"):
                found["finish_reason"] = choice["finish_reason"]
        for name, (section, key) in _COUNTS.items():
            if (chunk.get(section) or {}).get(key) is not None:
                found[name] = _count(chunk[section][key])
        if sources := (chunk.get("timings") or {}).get("draft_sources"):
            for name, key in (("drafts", "draft_n"), ("accepted", "draft_n_accepted")):
                found[name] = {source: [*map(_count, own[key])] for source, own in sources.items()}
    except UNEXPECTED:
        fault = f"the stream has {data[:60]!r}, which is not a chat completion chunk."
        raise BenchError(fault) from None
    if error is not None:
        message = error.get("message", error) if isinstance(error, dict) else error
        raise BenchError(f"an answer ended with the error: {str(message)[:300]}")
    return found


def _count(value: Any) -> int:
    if not 0 <= (count := int(value)) <= _MOST:
        raise ValueError(f"{value} is no count")
    return count


def _token_counts(
    events: Sequence[dict[str, Any]], last: dict[str, Any]
) -> tuple[list[float], Split]:
    count, total = len(events), last.get("num_tokens")
    if total is None:
        return [1.0] * count, Split.CHUNKS
    running = [event["num_tokens"] for event in events if "num_tokens" in event]
    if events and len(running) == count:
        steps = [float(b - a) for a, b in zip([0, *running], running)]
        # An event without a token of its own has text that was held back before.
        if steps[0] > 0 and min(steps) >= 0:
            return steps, Split.TOLD
    if total in (count, count + 1):
        return [1.0] * count, Split.SINGLE
    if not events:
        return [], Split.TEXT
    # One token for each event, or less, and the others in proportion to the lengths of the texts.
    # The token that stops an answer has no text.
    with_text = total - (last.get("finish_reason") == "stop")
    each, lengths = min(1.0, with_text / count), [len(event["text"]) for event in events]
    rest = (with_text - each * count) / sum(lengths)
    return [each + rest * length for length in lengths], Split.TEXT
