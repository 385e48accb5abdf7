"""Copied drafts change no token: with and without a head, greedy or sampled, with grammars."""

import dataclasses

import mlx.core as mx
import pytest

from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.batch import Batch
from mlx_mtp.engine.request import RequestOptions
from mlx_mtp.engine.step import StepPlan, StepRow
from mlx_mtp.speculative.costs import BatchCosts, StepCosts
from mlx_mtp.speculative.draft_policy import AdaptiveDrafts
from tests.engine.test_engine import Client
from tests.support.cases import EOS, STEP, make_requests
from tests.support.harness import Driver, greedy, plain, request
from tests.support.quick import pairwise
from tests.support.tiny_models import VOCAB


def cheap(head: bool = True, draft: float = 0.05, gap: float = 9.0) -> AdaptiveDrafts:
    """Returns a policy for which copies cost almost nothing, and a draft of the head `draft`.

    `gap` is the extra cost of a step without look-ahead.
    """
    costs = StepCosts()

    def of_batch(rows: int, *, sync: bool, others: int = 0) -> BatchCosts:
        verify = [1.0 + gap * sync + 0.02 * n / (rows + others) for n in range(16 * rows + 1)]
        return BatchCosts(verify, [draft * n for n in range(9)], 0.0, others)

    costs.of_batch = of_batch
    return AdaptiveDrafts(costs, 8 if head else 0)


@pairwise(
    head=(True, False),
    overlap=(True, False),
    gap=(0.0, 9.0),
    kind=("greedy", "sampled", "greedy grammars"),
)
def test_answers_that_repeat_earlier_ones(tiny_models, references, ties, kind, overlap, head, gap):
    """Each request arrives twice, and its second answer is drafted by copying the first."""
    family = "qwen3_next" if head else "qwen3_5"
    model, reference = tiny_models[family], references(family, kind)
    model = model if head else model.without_head()
    requests = make_requests(kind)
    config = EngineConfig(
        "auto", prefill_step_size=STEP, overlap=overlap, prefix_cache_size=1 << 28
    )
    policy = cheap(head, gap=gap)
    driver = Driver(model, vocab_size=VOCAB, stop_ids=(EOS,), config=config, depth=policy)
    plans, run = list[StepPlan](), driver.runner.run
    driver.runner.run = lambda plan: (plans.append(plan), run(plan))[1]
    driver.run_arrivals({0: requests[:4], 3: requests[4:]})
    copied = driver.core.scheduler.stats().num_accepted_tokens_per_pos.get("copy", (0,))
    again = [
        dataclasses.replace(r, request_id=r.request_id + "+", options=RequestOptions(trace=True))
        for r in requests
    ]
    driver.run_arrivals({0: again[:5], 4: again[5:]}, {6: [again[0].request_id]})
    for name, expected in reference.items():
        ties.check(name, driver.tokens(name), expected)
        if name + "+" != again[0].request_id:
            ties.check(name + "+", driver.tokens(name + "+"), expected)
    stats = driver.core.scheduler.stats()
    assert sum(stats.num_accepted_tokens_per_pos["copy"]) > sum(copied) + 20
    # Steps are read first if that costs nothing, by choice or for a grammar. Otherwise it is never
    # chosen, and runs go on behind windows in flight.
    assert any(plan.sync if gap else plan.needs_host for plan in plans) == (gap == 0)
    if overlap and gap and "grammars" not in kind:
        assert any(row.ahead for plan in plans for row in plan.decode)
    told = [o for r in again for o in driver.outputs[r.request_id] if o.draft_source == "copy"]
    assert any(len(o.token_ids) > 4 for o in told)
    assert all(len(o.drafts) == o.num_draft_tokens for o in told)


@pytest.mark.parametrize("own", [True, False], ids=["own", "others"])
@pytest.mark.parametrize("optimistic", [0.0, 1e-30])
def test_drafts_of_others_answers_are_told_only_if_accepted(tiny_models, own, optimistic):
    """Neither traces nor counts reveal rejected drafts of others' answers.

    Optimistic acceptance, which would accept them, gets no such drafts.
    """
    model, known, secret = tiny_models["qwen3_5"].without_head(), [9] * 20, [*range(40, 60)]
    config = EngineConfig("auto", prefix_cache_size=1 << 28)
    driver = Driver(model, vocab_size=VOCAB, config=config, depth=cheap(head=False))
    bias = {"logit_bias": ((9, 45.0),), "optimistic": optimistic}
    asked = request("a", [*known, *secret, 5] if own else [5], greedy(20, ignore_eos=True, **bias))
    sequence = driver.add(dataclasses.replace(asked, options=RequestOptions(trace=True)))
    if not own:
        driver.host_sources.keep(sequence.prefix.salt, [*known, *secret])
    plans, run = [], driver.runner.run
    driver.runner.run = lambda plan: (plans.append(plan), run(plan))[1]
    driver.run()
    outputs, stats = driver.outputs["a"], driver.core.scheduler.stats()
    tried = {token for plan in plans for row in plan.decode for token in row.run}
    assert set(secret).isdisjoint(tried) == (not own and optimistic > 0)
    assert set(secret).isdisjoint(token for o in outputs for token in o.drafts) != own
    assert set(secret).isdisjoint(driver.tokens("a")) or (own and optimistic)
    for count in (sum(o.num_draft_tokens for o in outputs), stats.num_draft_tokens):
        rejected = count - stats.num_accepted_tokens
        assert not rejected if not own else rejected or optimistic


def test_a_request_that_fixed_its_drafts_copies_nothing(tiny_models):
    model = tiny_models["qwen3_5"]
    driver = Driver(model, vocab_size=VOCAB, config=EngineConfig("auto"), depth=cheap(draft=2.0))
    asked = request("a", [5, 6], greedy(60, ignore_eos=True, logit_bias=((9, 100.0),)))
    driver.add(dataclasses.replace(asked, options=RequestOptions(num_draft_tokens=1)))
    driver.add(dataclasses.replace(asked, request_id="b"))
    got = driver.run()
    assert tuple(got["a"]) == tuple(got["b"]) == plain(model, asked, VOCAB).tokens
    assert {o.draft_source for o in driver.outputs["a"] if o.num_draft_tokens} == {"mtp"}
    assert "copy" in {o.draft_source for o in driver.outputs["b"]}


@pytest.mark.parametrize(
    ("drafts", "sources"),
    [("mtp,copy", ("mtp", "copy")), ("mtp", ("mtp",)), ("copy", ("copy",)), ("none", ())],
)
def test_the_flag_chooses_the_sources(tiny_models, drafts, sources):
    model, config = tiny_models["qwen3_5"], EngineConfig(drafts=drafts, max_num_seqs=2)
    client = Client(build_engine(model, config, VOCAB, (EOS,)))
    asked = request("r", [5, 6, 7] * 9, greedy(40, ignore_eos=True))
    client.engine.submit(asked)
    client.wait("r")
    info, stats = client.engine.info, client.engine.stats()
    client.engine.stop()
    assert tuple(client.tokens("r")) == plain(model, asked, VOCAB).tokens
    assert (info.draft_sources, info.mtp_enabled) == (sources, "mtp" in sources)
    assert set(stats.num_draft_tokens_per_pos) <= set(sources)


def test_a_run_goes_on_behind_what_the_window_in_flight_has_kept():
    batch = Batch.__new__(Batch)
    batch.sequences = ["head", "read", "all kept", "some kept"]
    batch.num_drafts, batch.drafts = [2, 0, 0, 0], mx.array([[7, 8], [0, 0], [0, 0], [0, 0]])
    batch.num_kept = mx.array([1, 3, 3, 1], dtype=mx.int32)
    runs = {
        "read": ([10, 11], 0),
        "all kept": ([20, 21, 22, 23, 24, 25], 3),
        "some kept": ([30, 31, 32, 33, 34], 3),
    }
    plans = [(name, *runs.get(name, ((), 0))) for name in batch.sequences]
    batch.upload_host_drafts([StepRow(name, run=run, ahead=ahead) for name, run, ahead in plans])
    assert batch.num_drafts == [2, 2, 3, 2]
    found = [row[:count] for row, count in zip(batch.drafts.tolist(), batch.num_drafts)]
    assert found == [[7, 8], [10, 11], [23, 24, 25], [31, 32]]
