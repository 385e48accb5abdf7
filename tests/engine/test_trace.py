"""A trace has the drafts of each step, and changes no token."""

from dataclasses import replace

import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import RequestOptions
from tests.support.cases import EOS, STEP, drafter_for, make_requests
from tests.support.harness import Driver
from tests.support.quick import diagonal
from tests.support.tiny_models import VOCAB


@diagonal(depth=(0, 1, 2, 3, "auto"), kind=("sampled", "greedy grammars"))
def test_what_each_step_drafted(tiny_models, references, ties, depth, kind):
    """Every other row has a trace: it has each counted draft; accepted drafts are the output."""
    model, reference = tiny_models["qwen3_5"], references("qwen3_5", kind)
    requests = [
        replace(r, options=RequestOptions(trace=n % 2 == 0))
        for n, r in enumerate(make_requests(kind))
    ]
    config = EngineConfig(num_draft_tokens=depth, prefill_step_size=STEP)
    drafter = drafter_for("mixed", model, reference, requests)
    driver = Driver(model, vocab_size=VOCAB, stop_ids=(EOS,), config=config, drafter=drafter)
    driver.run_arrivals({0: requests[:5], 4: requests[5:]})
    rejected = 0
    for wanted in requests:
        name = wanted.request_id
        ties.check(name, driver.tokens(name), reference[name])
        for output in driver.outputs[name]:
            if not wanted.options.trace:
                assert output.drafts is None
                continue
            drafts, accepted = output.drafts, output.num_accepted_tokens
            assert len(drafts) == output.num_draft_tokens
            assert output.draft_source in ("mtp", "copy")
            assert drafts[:accepted] == output.token_ids[:accepted]
            if accepted < len(output.token_ids) and accepted < len(drafts):
                rejected += 1
                assert drafts[accepted] != output.token_ids[accepted]
    assert (rejected > 0) == (depth != 0)
    stats = driver.core.scheduler.stats()
    tried, passed = stats.num_draft_tokens_per_pos, stats.num_accepted_tokens_per_pos
    assert sum(map(sum, tried.values())) == stats.num_draft_tokens
    assert all(a <= t for source in tried for a, t in zip(passed[source], tried[source]))
    if depth == "auto":
        reason = stats.choice
        assert sum(reason.drafts.values()) == dict(stats.depths)[reason.num_rows] * reason.num_rows
        assert reason.costs[0] == 1.0 and reason.tokens[0] == pytest.approx(reason.num_rows)
