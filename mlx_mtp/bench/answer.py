"""A timed answer of a server or an engine: when its tokens arrived, and how many at a time.

A chunk is the text that one read of the connection returned. Reads are parsed only after the answer
has ended, as the server can run on the same machine.
"""

import enum
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_mtp.errors import UNEXPECTED, BenchError

TimedRead = tuple[float, bytes]  # time of a read, in seconds of the client's clock, and its bytes
# Section and key of each count in a stream's JSON, by field of `TimedAnswer`; llama.cpp's timings.
_COUNTS = {
    "num_tokens": ("usage", "completion_tokens"),
    "prompt_tokens": ("usage", "prompt_tokens"),
    "num_drafts": ("timings", "draft_n"),
    "num_accepted": ("timings", "draft_n_accepted"),
}
_MAX_COUNT = 1 << 53


class Split(enum.StrEnum):
    """How the number of tokens in each chunk is known, the most reliable way first."""

    TOLD = "told"  # Each chunk has a running count, or the answer is from an engine directly.
    SINGLE = "single"  # There are as many chunks as tokens; the last token may have no text.
    TEXT = "text"  # Estimated: the usage is divided in proportion to the texts' lengths.
    CHUNKS = "chunks"  # The server sends no usage: each chunk counts as a token.


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The timing of one answer, in seconds of the client's clock."""

    sent: float  # just before the request was sent
    ended: float  # arrival of the last event
    times: tuple[float, ...]  # arrival of each chunk, increasing
    tokens: tuple[float, ...]  # tokens in each chunk; fractions if they are estimated
    num_tokens: int  # of the whole answer, tokens without text included
    split: Split
    num_events: int  # stream events with text; one read can return several
    prompt_tokens: int | None = None  # None if the server doesn't report it
    num_drafts: int = 0  # draft tokens verified, 0 if the server doesn't report it
    num_accepted: int = 0
    retries: int = 0  # refused connections before one was accepted
    # Drafts verified and accepted, by source and position; empty unless the server is mlx-mtp.
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


def parse_answer(sent: float, reads: Sequence[TimedRead], retries: int = 0) -> TimedAnswer:
    """Parse an answer's stream; BenchError if the stream has an error or was cut off."""
    ended, data, last = sent, "", dict[str, Any]()
    events: list[tuple[float, dict[str, Any]]] = []
    for ended, data in timed_events(reads):
        if data == "[DONE]":
            break
        chunk = _parse_chunk(data)
        last |= chunk
        if chunk["text"]:
            events.append((ended, chunk))
    if data != "[DONE]" and "finish_reason" not in last:
        raise BenchError(
            f"an answer was cut off after {len(events)} chunks: the server died or closed the "
            "connection."
        )
    if events and last.get("num_tokens") == 0:
        del last["num_tokens"]  # The answer has text, so 0 is not its count.
    tokens, split = _token_counts([event for _, event in events], last)
    chunks = defaultdict[float, float](float)  # The events of one read are one chunk.
    for (at, _), count in zip(events, tokens, strict=True):
        if count:
            chunks[at] += count
    counts = {k: v for k, v in last.items() if k not in ("text", "finish_reason")}
    fields = {"num_tokens": len(events), "num_events": len(events), "retries": retries} | counts
    return TimedAnswer(sent, ended, tuple(chunks), tuple(chunks.values()), split=split, **fields)


def timed_events(reads: Iterable[TimedRead]) -> Iterator[tuple[float, str]]:
    """Yields the time of the read that completed each server-sent event, and the event's data.

    Raises BenchError for data that is not UTF-8.
    """
    rest, data, time = b"", list[bytes](), 0.0
    # The end of the stream completes its last event.
    for at, received in itertools.chain(reads, [(None, b"\n\n")]):
        time = time if at is None else at
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                try:
                    yield time, b"\n".join(data).decode()
                except UnicodeDecodeError:
                    raise BenchError("the stream is not UTF-8.") from None
                data = []


def delta_texts(delta: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a delta adds to the "reasoning" and the "content" of a message."""
    # Some servers send the reasoning under both names.
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return {"reasoning": reasoning, "content": delta.get("content") or ""}


def _parse_chunk(data: str) -> dict[str, Any]:
    """Returns an event's text, finish reason if any, and counts by field of `TimedAnswer`."""
    fields: dict[str, Any] = {"text": ""}
    try:
        chunk = json.loads(data)
        error = chunk.get("error")
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            fields["text"] += "".join(delta_texts(delta).values())
            for call in delta.get("tool_calls") or []:
                function = call.get("function") or {}
                fields["text"] += (function.get("name") or "") + (function.get("arguments") or "")
            if choice.get("finish_reason"):
                fields["finish_reason"] = choice["finish_reason"]
        for name, (section, key) in _COUNTS.items():
            if (chunk.get(section) or {}).get(key) is not None:
                fields[name] = _count(chunk[section][key])
        if sources := (chunk.get("timings") or {}).get("draft_sources"):
            for name, key in (("drafts", "draft_n"), ("accepted", "draft_n_accepted")):
                fields[name] = {s: [*map(_count, counts[key])] for s, counts in sources.items()}
    except UNEXPECTED:
        fault = f"the stream has {data[:60]!r}, which is not a chat completion chunk."
        raise BenchError(fault) from None
    if error is not None:
        message = error.get("message", error) if isinstance(error, dict) else error
        raise BenchError(f"an answer ended with the error: {str(message)[:300]}")
    return fields


def _count(value: Any) -> int:
    if not 0 <= (count := int(value)) <= _MAX_COUNT:
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
        # An event without new tokens has text that the server had held back.
        if steps[0] > 0 and min(steps) >= 0:
            return steps, Split.TOLD
    if total in (count, count + 1):
        return [1.0] * count, Split.SINGLE
    if not events:
        return [], Split.TEXT
    # Each event gets at most one token, and the rest is divided in proportion to the lengths of the
    # texts. The token that stops an answer has no text.
    with_text = total - (last.get("finish_reason") == "stop")
    each, lengths = min(1.0, with_text / count), [len(event["text"]) for event in events]
    rest = (with_text - each * count) / sum(lengths)
    return [each + rest * length for length in lengths], Split.TEXT
