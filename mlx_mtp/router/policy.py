"""Which models are in memory, by what is asked for; without processes, requests and clocks.

Memory is a number of bytes that is shared out. A model is started when a request waits for it and
there is room for its least need. Idle models make room, the least recently asked first; models that
answer do so when a request has waited for `switch_after` seconds: they take no more requests then,
and become idle.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

DEATHS, DEATHS_SECONDS = 3, 60.0  # so many deaths within so long refuse a model for as long


class ModelState(StrEnum):
    """Where a model is; in memory in all states but the first."""

    ON_DISK = "on disk"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


_IN_MEMORY = (ModelState.LOADING, ModelState.READY)


@dataclass(eq=False)
class Resident:
    """A model that may be in memory. Times are seconds of one clock, sizes are bytes."""

    name: str
    keep_alive: float  # seconds that it stays while it is idle
    pinned: bool = False  # is started at once, and never ended
    need: int | None = None  # the least memory that it is started with; None: not known yet
    state: ModelState = ModelState.ON_DISK
    share: int = 0  # memory that it has; 0 on disk
    busy: int = 0  # requests that it answers
    waiting: dict[Any, float] = field(default_factory=dict)  # requests, with their arrival
    asked: float = 0.0  # when the last request came
    idle_since: float = 0.0
    draining: bool = False  # takes no more requests, so that another model gets its room
    deaths: list[float] = field(default_factory=list)
    refused_until: float = -math.inf  # after too many deaths

    @property
    def idle(self) -> bool:
        """Whether nobody loses anything if it is ended."""
        return self.state in _IN_MEMORY and not self.busy and (not self.waiting or self.draining)

    @property
    def since(self) -> float:
        """When the request came that has waited for longest."""
        return min(self.waiting.values(), default=-math.inf)

    def is_wanted(self, now: float) -> bool:
        """Whether it should be started."""
        on_disk = self.state is ModelState.ON_DISK and self.need is not None
        return on_disk and now >= self.refused_until and bool(self.waiting or self.pinned)

    def count_death(self, now: float) -> None:
        """Note that the process ended by itself, which may refuse the model for a while."""
        self.deaths = [*(at for at in self.deaths if now - at < DEATHS_SECONDS), now]
        if len(self.deaths) >= DEATHS:
            self.deaths, self.refused_until = [], now + DEATHS_SECONDS


class Decision(NamedTuple):
    """What is to be done now, and when to decide again at the latest (`inf`: no time is set)."""

    starts: list[Resident]  # their states and shares are set
    stops: list[Resident]
    again: float


def decide(models: Sequence[Resident], limit: int, now: float, switch_after: float) -> Decision:
    """Decide after any change; changes the states, the shares and who is draining."""
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
            break  # Nobody else may take the room.
        if now < (due := model.since + switch_after):
            again = min(again, due)
            continue
        # One that drains goes on with it, whoever is asked meanwhile.
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
    """The most memory that there will ever be for a model, beside those that are pinned."""
    pinned = (m.share or m.need or 0 for m in models if m.pinned and m is not model)
    return limit - sum(pinned)


def _fair_share(model: Resident, models: Iterable[Resident], limit: int) -> int:
    """The model's part of all memory if it is shared with the largest others that fit beside it.

    So each other model that fits beside its need fits beside its share, too.
    """
    total = need = model.need or 0
    others = sorted((m.need or 0 for m in models if m is not model), reverse=True)
    for other in others:
        if total + other <= limit:
            total += other
    return limit * need // total
