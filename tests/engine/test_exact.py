"""Exact answers: a prompt's chunks and its reused prefix depend only on its tokens."""

import itertools
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import RequestOptions
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.kernels import cpu
from mlx_mtp.prefix.policy import MIN_GAIN, PrefixReuse, chunk_ends, message_ends, save_points
from mlx_mtp.prefix.radix_tree import PrefixTree
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.draft_policy import FixedDrafts
from tests.prefix.test_policy import END, GAIN, STEP, World, messages
from tests.support import cases
from tests.support.grammars import bad_words, compiled
from tests.support.harness import Driver, request
from tests.support.quick import full
from tests.support.tiny_models import VOCAB

TEXTS = st.lists(st.sampled_from([END, 5, 5, 5, 6]), min_size=1, max_size=80)


def cuts_of(prompt, step=STEP, gain=GAIN):
    return chunk_ends(len(prompt), message_ends(prompt, {END}), step, gain)


@given(TEXTS, TEXTS, TEXTS)
def test_what_follows_a_cut_does_not_move_it(start, one, other):
    """Each cut is the first possible one: after a whole step, or at the end of a message."""
    first, second = (
        [cut for cut in cuts_of([*start, *rest]) if cut <= len(start)] for rest in (one, other)
    )
    assert first == second
    for low, high in pairwise([0, *first]):
        ends = [p for p in message_ends(start, {END}) if low + GAIN <= p <= low + STEP]
        assert high == min([low + STEP, *ends])


@given(TEXTS, st.integers(0, 60))
def test_prefixes_are_saved_at_cuts_alone(prompt, start):
    saved = save_points(
        len(prompt), start, message_ends(prompt, {END}), STEP, GAIN, cuts_of(prompt)
    )
    assert {*saved} <= {cut for cut in cuts_of(prompt) if cut > start}
    assert saved == sorted(saved)
    if (last := max(cuts_of(prompt), default=0)) > start:
        assert saved[-1] == last


@pytest.mark.parametrize(
    ("prompt", "points"),
    [
        # The end of the prompt is no cut: a following token would be in the same chunk.
        ([*messages(100, 200, 300, 400), *[5] * 7], [100, 300, 600, 1000]),
        ([*messages(100, 30), *[5] * 7], [100]),
        (messages(20), []),
        ([5] * 3000, [512, 1024, 2048, 2560]),
        # If there is no cut at the first message's end, the cut before it is the shared one.
        ([*messages(520, 10), *[5] * 3], [512]),
    ],
)
def test_points_where_a_prompt_is_saved(prompt, points):
    ends = message_ends(prompt, {END})
    where = chunk_ends(len(prompt), ends, 512)
    assert save_points(len(prompt), 0, ends, 512, MIN_GAIN, where) == points


class Exact(World):
    """Records every chunk, and checks that no two prompts share one."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__(rows)
        self.tree = PrefixTree(100_000)
        self.reuse = PrefixReuse(self.tree, {END}, STEP, GAIN, exact=True)
        config = EngineConfig(
            max_num_seqs=rows, prefill_step_size=STEP, exact=True, max_decode_pause=1.0
        )
        self.policy = Scheduler(config, FixedDrafts(2), self.reuse)
        self.chunks: dict[str, list[tuple[int, int]]] = {}

    def step(self, fail: bool = False):
        plan = super().step(fail)
        assert len(plan.chunk) <= 1 and not plan.together
        for row in plan.chunk:
            span = row.start, row.start + row.length
            self.chunks.setdefault(row.sequence.request_id, []).append(span)
        return plan


@given(
    st.lists(st.tuples(st.integers(0, 2), TEXTS), min_size=1, max_size=8),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_a_prompt_is_cut_alike_under_any_load(texts, pauses):
    """Under any load and cache, a prompt's chunks are the last of those it has alone and cold."""
    shared = [messages(20), messages(9, 30), [5] * 40]
    world = Exact()
    prompts = {str(i): [*shared[which], *text] for i, (which, text) in enumerate(texts)}
    for (name, prompt), pause in zip(prompts.items(), pauses):
        world.add(name, prompt)
        for _ in range(pause):
            world.step()
    while not world.policy.idle:
        world.step()
    for name, prompt in prompts.items():
        alone = Exact()
        alone.add("alone", prompt)
        alone.step()
        while not alone.policy.idle:
            alone.step()
        found, all_of = world.chunks[name], alone.chunks["alone"]
        assert found in ([*all_of[len(all_of) - len(found) :]], [(len(prompt), len(prompt))])


def test_a_warm_prompt_has_the_bits_of_a_cold_one(tiny_models, monkeypatch):
    """Also after prompts that share a part, and with drafts; attention reads equal lengths."""
    model, bits, read = tiny_models["qwen3_5_moe"], set(), set()
    attend = cpu.attend

    def noted(queries, kv, bias):
        read.add((queries.shape[1], bias.shape[-1]))
        return attend(queries, kv, bias)

    monkeypatch.setattr(cpu, "attend", noted)
    # 128 tokens, so that a draft lies beyond the KV that attention reads for the prompt alone.
    chat = [*range(2, 40), END, *range(3, 60), END, *range(20, 51)]
    sampling = SamplingParams(max_tokens=4, temperature=0.0, top_logprobs=3, ignore_eos=True)
    earlier = [[], [chat[:50]], [chat, chat], [[*chat[:45], 9], chat[:97]]]
    # This prompt shares three tokens of a chunk that ends elsewhere.
    earlier.append([[*chat[:100], END, 7, 8], chat])
    for depth, before in itertools.product((0, 3), earlier):
        config = EngineConfig(depth, prefill_step_size=16, prefix_cache_size=1 << 30, exact=True)
        driver = Driver(model, vocab_size=VOCAB, stop_ids=(END,), config=config)
        for number, prompt in enumerate([*before, chat]):
            driver.add(request(str(number), prompt, sampling))
            driver.run()
        name = str(len(before))
        assert (driver.reused(name) > 0) == bool(before)
        assert driver.reused(name) in [0, *cuts_of(chat)]
        bits.add(driver.outputs[name][0].logprobs)
    last = len(chat) - max(cuts_of(chat))
    assert len(bits) == len([keys for tokens, keys in read if tokens == last]) == 1
    # The state at an answer's end is not reused: its bits are not those of a prompt's.
    answered = [*chat, *driver.tokens(name), 7]
    driver.add(request("next", answered, sampling))
    driver.run()
    assert driver.reused("next") == max(cuts_of(chat))


def kinds(name, prompt):
    """Returns requests with the same prompt and different parameters."""
    own = SamplingParams(max_tokens=7, temperature=1.0, seed=3, top_logprobs=3)
    return [
        request(name, prompt, replace(own, max_tokens=50, ignore_eos=True)),
        request(name, prompt, replace(own, choice=1, top_k=4)),
        request(name, prompt, replace(own, prompt_logprobs=2)),
        request(name, prompt, replace(own, optimistic=0.3)),
        request(name, prompt, replace(own, allowed_token_ids=(5, 6, 7))),
        request(name, prompt, own, compiled(cases.SPECS[3])),
        replace(
            request(name, prompt, own),
            options=RequestOptions(num_draft_tokens=3, cache_salt="other"),
        ),
        replace(
            request(name, prompt, own),
            bad_words=bad_words("ab"),
            options=RequestOptions(progress=True),
        ),
    ]


class Noted(Driver):
    """A driver that records the chunks of each prompt."""

    def __init__(self, model, **config) -> None:
        self.chunks: dict[str, list[tuple[int, int]]] = {}
        config = EngineConfig(prefill_step_size=STEP, exact=True, **config)
        super().__init__(model, vocab_size=VOCAB, stop_ids=(END,), config=config, min_gain=GAIN)
        run = self.runner.run

        def noted(plan):
            assert len(plan.chunk) <= 1
            for row in plan.chunk:
                span = row.start, row.start + row.length
                self.chunks.setdefault(row.sequence.request_id, []).append(span)
            return run(plan)

        self.runner.run = noted

    def prompt_bits(self, name):
        """Returns the logprobs that the prompt decides: its own and the first token's."""
        first = next((each for each in self.outputs[name] if each.token_ids), None)
        return first and (first.logprobs[0].top, first.prompt_logprobs)


PROMPTS = [
    [*messages(20), *messages(9, 30)],
    [*messages(20), *messages(9, 12), *[7] * 45],
    [*messages(20), *messages(3, 2, 4, 3, 9, 2, 1, 40), *[8] * STEP],
    [*range(2, 2 + 4 * STEP)],
    [5, 6],
]
ASKED = st.tuples(
    st.sampled_from(range(len(PROMPTS))),
    st.sampled_from(range(8)),
    st.integers(0, 12),  # step of its arrival
    st.none() | st.integers(1, 6),  # steps from its arrival to its cancellation
)


@pytest.fixture(scope="module")
def alone(tiny_models):
    """A function that returns a request's chunks and bits: alone, cold and without drafts."""
    known = {}

    def run(prompt, kind):
        if (prompt, kind) not in known:
            driver = Noted(tiny_models["qwen3_next"], num_draft_tokens=0)
            asked = kinds("alone", PROMPTS[prompt])[kind]
            first = replace(asked.sampling, max_tokens=1)  # Only its bits are compared.
            driver.add(replace(asked, sampling=first))
            driver.run()
            known[prompt, kind] = driver.chunks["alone"], driver.prompt_bits("alone")
        return known[prompt, kind]

    return run


@pytest.mark.parametrize("examples", [5, full(100)])
def test_a_prompt_has_its_chunks_and_bits_whatever_is_asked_beside_it(tiny_models, alone, examples):
    """Beside choices, prompt logprobs, grammars, drafts and cancelled prompts; with any cache."""

    @settings(max_examples=examples, suppress_health_check=[*HealthCheck])
    @given(
        asked=st.lists(ASKED, min_size=2, max_size=7),
        rows=st.integers(1, 5),
        room=st.sampled_from([0, 300_000, 1 << 30]),
        overlap=st.booleans(),
    )
    def check(asked, rows, room, overlap) -> None:
        config = {"max_num_seqs": rows, "prefix_cache_size": room, "overlap": overlap}
        driver = Noted(
            tiny_models["qwen3_next"], **config, num_draft_tokens="auto", max_decode_pause=1
        )
        arrivals, cancels = {}, {}
        for number, (prompt, kind, start, ends) in enumerate(asked):
            arrivals.setdefault(start, []).append(kinds(f"{number}", PROMPTS[prompt])[kind])
            if ends is not None:
                cancels.setdefault(start + ends, []).append(f"{number}")
        driver.run_arrivals(arrivals, cancels)
        for number, (prompt, kind, _, ends) in enumerate(asked):
            chunks, bits = alone(prompt, kind)
            found, length = driver.chunks.get(f"{number}", []), len(PROMPTS[prompt])
            if driver.prompt_bits(f"{number}") is None:
                assert ends is not None  # Cancelled before its first token.
                reused = found[0][0] if found else 0
                expected = [each for each in chunks if each[0] >= reused]
                assert found in (expected[: len(found)], [(length, length)])
                continue
            assert found in (chunks[len(chunks) - len(found) :], [(length, length)])
            assert driver.prompt_bits(f"{number}") == bits

    check()
