"""A whole answer, from its deltas: for answers that aren't streamed, and for stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

from mlx_mtp.server.generation import Generation
from mlx_mtp.server.output_stream import Delta
from mlx_mtp.server.parsing.events import Event, Reasoning, Text, ToolArguments, ToolBroken


class Collector:
    """Joins the deltas of so many choices to one for each."""

    def __init__(self, num_choices: int) -> None:
        self._events: list[list[Event]] = [[] for _ in range(num_choices)]
        self._last = [Delta(index) for index in range(num_choices)]

    def add(self, delta: Delta) -> None:
        self._events[delta.index] += delta.events
        self._last[delta.index] = delta

    def answers(self) -> list[Delta]:
        """The choices, with one event for each run of text, reasoning or arguments."""
        pairs = zip(self._last, self._events)
        return [replace(last, events=_joined(events)) for last, events in pairs]


async def collect_response(generation: Generation, patience: float) -> list[Delta]:
    """All choices, whole; `patience` is that of `Generation.deltas`."""
    collector = Collector(len(generation.streams))
    async for deltas in generation.deltas(patience):
        for delta in deltas:
            collector.add(delta)
    return collector.answers()


def _joined(events: Sequence[Event]) -> list[Event]:
    """The same events in runs, in which a broken call is text like that around it."""
    broken = {event.call for event in events if isinstance(event, ToolBroken)}
    sound: list[Event] = []
    for event in events:
        if isinstance(event, ToolBroken):
            sound.append(Text(event.text, event.start, event.tokens))
        elif getattr(event, "call", None) not in broken:
            sound.append(event)
    joined: list[Event] = []
    for kind, group in groupby(sound, type):
        run: list[Any] = list(group)
        if kind in (Text, Reasoning, ToolArguments):
            # At once: to add the pieces one by one takes a time that grows with their square.
            more: dict[str, Any] = {"text": "".join(event.text for event in run)}
            if kind is Text:
                more["tokens"] = tuple(chain.from_iterable(event.tokens for event in run))
            run = [replace(run[0], **more)]
        joined += run
    return joined
