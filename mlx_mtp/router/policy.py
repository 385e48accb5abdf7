"""Decides which models are in memory; knows no processes, HTTP requests or clocks.

The models share a limit in bytes. A model starts when a request waits for it and `need` is free.
Idle models are stopped to make room, the least recently used first. Once a request has waited for
`switch_after` seconds, busy models drain to make room: they take no more requests and become idle.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

DEATHS, DEATHS_SECONDS = 3, 60.0  # A model that dies 3 times within 60 s is refused for 60 s.


class ModelState(StrEnum):
    """The state of a model, which takes memory in all states except `ON_DISK`."""

    ON_DISK = "on disk"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


_IN_MEMORY = (ModelState.LOADING, ModelState.READY)


@dataclass(eq=False)
class Resident:
    """A model that may be in memory. Times are seconds of one clock, sizes are bytes."""

    name: str
    keep_alive: float  # seconds that it stays loaded while it is idle
    pinned: bool = False  # started immediately and never stopped
    need: int | None = None  # minimum memory to start it with; None: not known yet
    state: ModelState = ModelState.ON_DISK
    share: int = 0  # memory assigned to it; 0 on disk
    busy: int = 0  # number of requests that it is answering
    waiting: dict[Any, float] = field(default_factory=dict)  # arrival time by request
    asked: float = 0.0  # when the last request came
    idle_since: float = 0.0
    draining: bool = False  # takes no more requests, to make room for another model
    deaths: list[float] = field(default_factory=list)
    refused_until: float = -math.inf  # after too many deaths

    @property
    def idle(self) -> bool:
        """True if the model can be stopped without failing a request."""
        return self.state in _IN_MEMORY and not self.busy and (not self.waiting or self.draining)

    @property
    def since(self) -> float:
        """Arrival of the request that has waited longest; -inf if none waits."""
        return min(self.waiting.values(), default=-math.inf)

    def is_wanted(self, now: float) -> bool:
        """Returns True if the model should be started as soon as there is room."""
        on_disk = self.state is ModelState.ON_DISK and self.need is not None
        return on_disk and now >= self.refused_until and bool(self.waiting or self.pinned)

    def count_death(self, now: float) -> None:
        """Record that the process ended unexpectedly; refuse the model after `DEATHS` of these."""
        self.deaths = [*(at for at in self.deaths if now - at < DEATHS_SECONDS), now]
        if len(self.deaths) >= DEATHS:
            self.deaths, self.refused_until = [], now + DEATHS_SECONDS


class Decision(NamedTuple):
    """What to do now, and the time by which to decide again (`inf`: only after a change)."""

    starts: list[Resident]  # `state` and `share` are already set
    stops: list[Resident]
    again: float


def decide(models: Sequence[Resident], limit: int, now: float, switch_after: float) -> Decision:
    """Decide after any change; sets `state`, `share` and `draining` of the models."""
    starts: list[Resident] = []
    stops: list[Resident] = []
    drained: list[Resident] = []
    again = math.inf
    for model in models:
        if (model.waiting or model.pinned) and now < model.refused_until:
            again = min(again, model.refused_until)
        if model.state is ModelState.READY and model.idle and not (model.waiting or model.pinned):
            until = model.idle_since + model.keep_alive
            again = min(again, until if now < until else math.inf)
            stops += [model] if now >= until else []
    free = limit - sum(model.share for model in models)
    for model in sorted((m for m in models if m.is_wanted(now)), key=lambda m: m.since):
        need = model.need or 0
        if need <= free:
            model.state = ModelState.LOADING
            model.share = max(need, min(_fair_share(model, models, limit), free))
            free -= model.share
            starts.append(model)
            continue
        leaving = [m for m in models if m.state is ModelState.STOPPING or m in stops]
        room = free + sum(m.share for m in leaving)
        movable = [m for m in models if m.state in _IN_MEMORY and not m.pinned and m not in leaving]
        spared: list[Resident] = []
        for other in sorted(movable, key=lambda m: m.asked):
            if other.idle and room < need:
                spared.append(other)
                room += other.share
        if room >= need:
            stops += spared
            break  # No later request may take the room.
        if now < (due := model.since + switch_after):
            again = min(again, due)
            continue
        # A model that has drained takes no requests until it makes room, even if some wait for it.
        drained += [other for other in spared if other.draining]
        answering = [m for m in movable if m.busy]
        for other in sorted(answering, key=lambda m: (not m.draining, m.asked)):
            if room < need:
                drained.append(other)
                room += other.share
        break
    for model in models:
        model.draining = model in drained
    for model in stops:
        model.state = ModelState.STOPPING
    return Decision(starts, stops, again)


def most_room(model: Resident, models: Iterable[Resident], limit: int) -> int:
    """Returns the maximum number of bytes that a model can ever get beside the pinned models."""
    pinned = (m.share or m.need or 0 for m in models if m.pinned and m is not model)
    return limit - sum(pinned)


def _fair_share(model: Resident, models: Iterable[Resident], limit: int) -> int:
    """Returns the model's part of `limit`, shared with the largest others that fit beside its need.

    Every other model that fits beside its need therefore fits beside its share, too.
    """
    total = need = model.need or 0
    others = sorted((m.need or 0 for m in models if m is not model), reverse=True)
    for other in others:
        if total + other <= limit:
            total += other
    return limit * need // total
