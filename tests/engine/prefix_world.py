"""A scheduler with a prefix cache, and a runner that only saves what it should. No arrays."""

from __future__ import annotations

from collections.abc import Callable

from mlx_mtp.cache.prefix_tree import Fetch, PrefixTree
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.reuse import PrefixReuse
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepPlan
from mlx_mtp.errors import StepError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.depth import FixedDepth
from tests.cache.fake_prefixes import FakeDisk, check_integrity, put
from tests.cache.prefixes import nodes

END = 1
STEP = 16
GAIN = 4


class World:
    """What happens to requests, step by step, with a clock that a test turns.

    Attributes:
        computed: prompt tokens that each request had computed.
        admitted: requests in the order in which their prompts began.
        saves: the runner saves what it should.
    """

    def __init__(
        self,
        rows: int = 8,
        step: int = STEP,
        limit: int = 100_000,
        memory: Callable[[int, int], bool] | None = None,
    ) -> None:
        self.disk = FakeDisk()
        self.tree = PrefixTree(limit, self.disk)
        self.now = 0.0
        self.reuse = PrefixReuse(self.tree, {END}, step, GAIN, clock=lambda: self.now)
        config = EngineConfig(max_num_seqs=rows, prefill_step_size=step)
        self.policy = Scheduler(config, FixedDepth(2), self.reuse, memory)
        self.saves = True
        self.computed: dict[str, int] = {}
        self.admitted: list[str] = []

    def add(self, name: str, prompt, salt: str = "", client: str = "") -> Sequence:
        wanted = Request(
            name, tuple(prompt), SamplingParams(max_tokens=2), cache_salt=salt, client=(client,)
        )
        sequence = Sequence(wanted, (END,), 2)
        self.policy.add(sequence)
        return sequence

    def on_disk(self, *prompts) -> None:
        """These have been computed and are on the disk alone; reads take their time."""
        for number, prompt in enumerate(prompts):
            self.add(f"before {number}", prompt)
            self.run()
        self.tree.clear()
        assert self.tree.nbytes == 0
        self.disk.state = Fetch.COMING
        self.computed.clear()
        self.admitted.clear()

    def step(self, fail: bool = False) -> StepPlan:
        plan = self.policy.schedule()
        steps = []
        for row, start, length in plan.chunk.rows if plan.chunk else ():
            if row.request_id not in self.admitted:
                self.admitted.append(row.request_id)
            row.launched(length)
            if fail:
                steps.append(InFlightStep((row,), (length,), error=StepError("broken")))
                continue
            self.computed[row.request_id] = self.computed.get(row.request_id, 0) + length
            end = start + length
            if end in row.save_points:
                if self.saves:
                    put(self.tree, row.prompt[:end], row.salt)
                row.saved(end)
            tokens = (7,) if end == row.num_prompt else ()
            steps.append(InFlightStep((row,), (length,), is_prefill=True, token_ids=[tokens]))
        for row in plan.decode:
            row.launched(1)
            finished = [row.num_output + 1 >= 2]
            steps.append(
                InFlightStep((row,), (1,), num_cached=[1], token_ids=[(7,)], finished=finished)
            )
        self.policy.update(steps)
        return plan

    def run(self, limit: int = 2000) -> None:
        """Step until all requests have ended; nothing of theirs is left."""
        for _ in range(limit):
            if self.policy.idle:
                self.policy.schedule()
                assert self.disk.wanted is None
                assert all(not node.pins for node in nodes(self.tree))
                assert not self.reuse._reads
                check_integrity(self.tree)
                return
            self.step()
        raise AssertionError("some request waits for ever")
