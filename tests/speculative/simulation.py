"""A machine and a head made of numbers, run by a depth policy with the engine's look-ahead."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlx_mtp.speculative.depth import DecodeStep, DepthPolicy, DraftRow, Outcome

Cost = Callable[[int, int], float]
"""(batch size, depth) -> seconds of a step that verifies and proposes that many drafts."""
Rates = Callable[[int, int], Sequence[float]]
"""(row, step) -> the chance of each position's draft, given those before it."""


@dataclass
class Machine:
    """Steps that take time and bring tokens.

    The policy observes noisy times and drawn acceptance; `seconds` and `tokens` are what is
    expected of them, so that the policy is judged without the noise.
    """

    cost: Cost
    rates: Rates
    noise: float = 0.03  # spread (sigma of the log) of a step's time
    late: float = 0.01  # share of the steps that take up to ten times as long
    first: float = 1.0  # how many times as long the first step of a shape takes
    draft_share: float = 0.4  # of the cost above depth 0, what is spent on proposing
    seed: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    num_steps: int = 0
    depths: list[int] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(
        self, policy: DepthPolicy, size: int, num_steps: int, rows: list[DraftRow] | None = None
    ):
        """Steps of one unchanging batch; returns tokens per second."""
        rows = rows or [DraftRow() for _ in range(size)]
        began, before = self.seconds, self.tokens
        window = policy.depth(rows, steady=False)
        last: int | None = None
        unread: deque[DecodeStep] = deque()
        for _ in range(num_steps):
            proposed = policy.depth(rows, steady=True)
            step = self._step(rows, window, proposed, clean=last == window == proposed)
            unread.append(step)
            if len(unread) > 1:
                policy.observe(unread.popleft())
            last, window = window, proposed
        for step in unread:
            policy.observe(step)
        return (self.tokens - before) / (self.seconds - began)

    def _step(self, rows: list[DraftRow], window: int, proposed: int, *, clean: bool) -> DecodeStep:
        size = len(rows)
        plain = self.cost(size, 0)
        verify = plain + (1 - self.draft_share) * (self.cost(size, window) - plain)
        seconds = verify + self.draft_share * (self.cost(size, proposed) - plain)
        self.seconds += seconds
        seconds *= self.random.lognormvariate(0.0, self.noise)
        if self.random.random() < self.late:
            seconds *= 1 + 9 * self.random.random()
        if (size, window) not in self.seen:
            self.seen.add((size, window))
            seconds *= self.first
        outcomes = []
        for index, row in enumerate(rows):
            count, accepted = row.num_drafts(window), 0
            rates = self.rates(index, self.num_steps)
            while accepted < count and self.random.random() < rates[accepted]:
                accepted += 1
            outcomes.append(Outcome(row, count, accepted, cut=False))
            self.tokens += _expected(rates[:count])
        self.num_steps += 1
        self.depths.append(window)
        return DecodeStep(size, window, outcomes, seconds if clean else None)


def best_fixed(cost: Cost, rates: Sequence[float], size: int, max_depth: int = 8):
    """The best depth where all rows have these rates, and its tokens per second."""

    def speed(depth: int) -> float:
        return size * _expected(rates[:depth]) / cost(size, depth)

    depth = max(range(max_depth + 1), key=speed)
    return depth, speed(depth)


def _expected(rates: Sequence[float]) -> float:
    """Tokens of a window."""
    tokens = reached = 1.0
    for rate in rates:
        reached *= rate
        tokens += reached
    return tokens
