"""Short answers computed before any client's, so that a server that is ready can answer."""

import math
from collections import Counter

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.errors import ModelError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.draft_policy import FixedDrafts

# Rows, and tokens of each prompt and answer. Long enough that every kernel that a prompt can run is
# checked now. If a kernel failed its check later, in a client's request, other kernels would run,
# and prefixes on disk would no longer be found, as their keys name the kernels.
_ROWS, _PROMPT, _ANSWER = 2, 64, 4


def warm_up(
    config: EngineConfig, vocab_size: int, num_draft_tokens: int, runner: ModelRunner
) -> None:
    """Compute two short answers; raises ModelError if that fails or ranks disagree.

    Logits that are not finite are a failure. The requests run in a scheduler of their own, like
    those that measure step costs.
    """
    scheduler = Scheduler(config, FixedDrafts(num_draft_tokens))
    core = EngineCore(scheduler, runner, overlap=config.overlap)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, top_logprobs=0, ignore_eos=True)
    waiting = []
    for row in range(_ROWS):
        # Ids from the whole vocabulary, so that most experts take part.
        prompt = tuple((n * vocab_size // _PROMPT + row) % vocab_size for n in range(_PROMPT))
        request = Request(f"first-answer-{row}", prompt, sampling)
        waiting.append(Sequence(request, (), 16 * _ANSWER))
    num_tokens = Counter[str]()
    while len(num_tokens) < _ROWS or min(num_tokens.values()) < _ANSWER:
        if waiting:
            core.scheduler.add(waiting.pop())  # One per step: each prompt is computed alone.
        for output in core.step():
            num_tokens[output.request_id] += len(output.token_ids)
            if output.error is not None:
                raise ModelError(str(output.error))
            if not all(math.isfinite(each.logprob) for each in output.logprobs):
                raise ModelError("its logits are not finite: are its weights damaged?")
    runner.check_ranks_agree()
    core.scheduler.cancel()  # An answer that ends normally would be saved in the prefix cache.
    while not core.idle:
        core.step()
