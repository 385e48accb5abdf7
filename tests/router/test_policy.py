"""The policy for which models are in memory, without processes."""

import itertools
import math
import random

import pytest

from mlx_mtp.router.policy import ModelState, Resident, decide, most_room

ON_DISK, LOADING, READY, STOPPING = ModelState


def resident(name: str, need: int, **fields: object) -> Resident:
    model = Resident(name, math.inf, need=need)
    for key, value in fields.items():
        setattr(model, key, value)
    return model


def names(models: list[Resident]) -> str:
    return "".join(each.name for each in models)


@pytest.mark.parametrize(
    ("needs", "limit", "shares"),
    [
        ((10, 10, 10), 25, (12, 12, 12)),  # Any two fit together.
        ((10, 10, 10), 40, (13, 13, 13)),
        ((60, 30, 20), 100, (66, 33, 25)),  # Room is left for the largest other that fits.
        ((60, 60, 5), 100, (92, 92, 7)),
        ((100,), 100, (100,)),
    ],
)
def test_a_share_leaves_room_for_the_others_that_fit(
    needs: tuple[int, ...], limit: int, shares: tuple[int, ...]
) -> None:
    for number, share in enumerate(shares):
        models = [resident(str(n), need) for n, need in enumerate(needs)]
        models[number].waiting["r"] = 0.0
        assert names(decide(models, limit, 0.0, 30.0).starts) == str(number)
        assert models[number].share == share
        for other in models:
            if other is not models[number] and other.need + needs[number] <= limit:
                assert other.need <= limit - share


def test_random_requests_are_all_served_and_no_busy_model_ends() -> None:
    """A simulation: models load and stop after a while, answers take a while, clients leave."""
    for seed in range(30):
        draw = random.Random(seed)
        limit, switch_after = 100, 30.0
        models = [resident(name, draw.randint(10, 60)) for name in "abcdef"[: draw.randint(2, 6)]]
        for model in models:
            model.keep_alive = draw.choice([0.0, 5.0, math.inf])
        models[0].pinned = seed % 3 == 0
        later: list[tuple[float, int, str, Resident, int]] = []  # time, order, event, model, ID
        arrivals = iter(sorted(draw.uniform(0, 300) for _ in range(60)))
        arrived, served, left, longest, order = 0, 0, 0, 0.0, itertools.count()
        next_arrival, now = next(arrivals), 0.0
        while True:
            decision = decide(models, limit, now, switch_after)
            assert sum(each.share for each in models) <= limit
            for model in decision.stops:
                assert model.busy == 0
                assert not model.pinned
                later.append((now + draw.uniform(0, 3), next(order), "gone", model, 0))
            for model in decision.starts:
                assert model.share >= model.need
                later.append((now + draw.uniform(0, 20), next(order), "ready", model, 0))
            for model in models:
                if model.state is READY and not model.draining:
                    for arrival in model.waiting.values():
                        longest = max(longest, now - arrival)
                        model.busy += 1
                        later.append((now + draw.uniform(0, 60), next(order), "end", model, 0))
                    model.waiting = {}
            assert decision.again > now
            times = [decision.again, next_arrival, *(each[0] for each in later)]
            if (now := min(times)) == math.inf:
                break
            if now == next_arrival:
                model = draw.choice(models)
                if most_room(model, models, limit) >= model.need:
                    model.waiting[arrived], model.asked, arrived = now, now, arrived + 1
                    if draw.random() < 0.2:
                        leaves = now + draw.uniform(0, 20)
                        later.append((leaves, next(order), "leave", model, arrived - 1))
                next_arrival = next(arrivals, math.inf)
                continue
            due = [each for each in later if each[0] <= now]
            later = [each for each in later if each[0] > now]
            for _, _, kind, of, request in sorted(due, key=lambda each: each[:2]):
                if kind == "leave":
                    left += of.waiting.pop(request, None) is not None
                elif kind == "end":
                    of.busy, of.idle_since, served = of.busy - 1, now, served + 1
                elif kind == "gone":
                    of.state, of.share = ON_DISK, 0
                elif of.state is LOADING:
                    of.state, of.idle_since = READY, now
        assert served + left == arrived > 20
        assert not any(each.waiting or each.busy for each in models)
        # Every other model may get a turn first, with its longest answer, stop and load.
        assert longest <= len(models) * (switch_after + 60 + 3 + 20)


def test_only_as_many_idle_models_leave_as_are_needed_and_none_for_nothing() -> None:
    def loaded(name: str, asked: float, **fields: object) -> Resident:
        return resident(name, 30, state=READY, share=30, asked=asked, **fields)

    def decided(need: int, *others: Resident, now: float = 1.0) -> str:
        wanted = resident("w", need)
        wanted.waiting["r"] = 0.0
        decision = decide([*others, wanted], 100, now, 30.0)
        return f"{names(decision.starts)}-{names(decision.stops)}"

    assert decided(10, loaded("a", 1), loaded("b", 2), loaded("c", 3)) == "w-"
    assert decided(11, loaded("a", 3), loaded("b", 1), loaded("c", 2)) == "-b"
    assert decided(70, loaded("a", 3), loaded("b", 1), loaded("c", 2)) == "-bc"
    # Stopping the idle models frees too little: they stay, and later the busy one drains.
    busy = loaded("c", 2, busy=1)
    assert decided(80, loaded("a", 3), loaded("b", 1), busy) == "-"
    assert not busy.draining
    assert decided(80, loaded("a", 3), loaded("b", 1), busy, now=31.0) == "-"
    assert busy.draining
    # No request waits for room any more.
    decide([busy], 100, 32.0, 30.0)
    assert not busy.draining


def test_deaths_within_a_minute_refuse_a_model_for_a_while() -> None:
    model = resident("a", 10)
    model.waiting["r"] = 0.0
    for now in (0.0, 50.0, 61.0):
        model.count_death(now)
        assert model.is_wanted(now)
    model.count_death(62.0)
    assert not model.is_wanted(62.0)
    assert decide([model], 100, 62.0, 30.0).again == 122.0
    assert model.is_wanted(122.0)
