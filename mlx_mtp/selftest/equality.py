"""MTP's tokens against those of plain decoding, and how many drafts were accepted on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_mtp.bench.offline import ChatTokenizer, EngineSubject
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.selftest.budget import Budget
from mlx_mtp.speculative.acceptance import SpeculationCounters

TIE = 1e-4
"""Two candidates closer than this may change places in float32 when shapes change."""
_MOST_TOKENS = 48
_RAW_TOKENS = 24
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Reference:
    """A plain answer, decoded alone.

    Args:
        tokens: greedy.
        gaps: how far the runner-up's log-probability was behind at each.
    """

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an answer left the reference.

    Args:
        prompt: its number, from 0.
        token: of the answer, from 0.
        gap: how far the runner-up was behind there; None past the reference's end.
    """

    prompt: int
    token: int
    gap: float | None


@dataclass(frozen=True, slots=True)
class Equality:
    """One engine's answers beside the references.

    Args:
        name: of the engine.
        answers: compared.
        tokens: of the references.
        identical: of these, before the answer parted.
        partings: of answers that did.
        accepted: share of the chats' windows in which the draft at each position was right, from
            the first.
        problem: why there are no answers; None if there are.
    """

    name: str
    answers: int
    tokens: int
    identical: int
    partings: tuple[Parting, ...] = ()
    accepted: tuple[float, ...] = ()
    problem: str | None = None

    def ok(self, *, strict: bool) -> bool:
        """Nothing is wrong.

        Args:
            strict: only ties excuse a difference; else it is measured and not judged.
        """
        if self.problem is not None:
            return False
        ties = all(p.gap is not None and p.gap < TIE for p in self.partings)
        return ties or not strict


@dataclass
class Recorder:
    """Keeps what an engine gave, request by request."""

    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)

    def observe(self, outputs: Sequence[RequestOutput]) -> None:
        """Take in a step."""
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def tokens(self, request_id: str) -> tuple[int, ...]:
        """Of one answer."""
        return tuple(t for output in self.outputs[request_id] for t in output.token_ids)


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """What is answered.

    Args:
        ids: of its tokens.
        is_chat: its answer says something about acceptance; one to raw tokens doesn't.
    """

    ids: tuple[int, ...]
    is_chat: bool


def built_in_prompts(tokenizer: ChatTokenizer) -> list[BuiltIn]:
    """Six short chats, and two prompts of raw tokens that no tokenizer would give."""
    source = PromptSource(seed=0)
    chats = [*source.next("story", 2), *source.next("short", 4)]
    encoded = [
        BuiltIn(tokenizer.encode_chat([{"role": "user", "content": p.text}]), is_chat=True)
        for p in chats
    ]
    vocab_size = tokenizer.vocab_size
    raw = [
        BuiltIn(tuple(step * i % vocab_size for i in range(1, _RAW_TOKENS)), is_chat=False)
        for step in (7919, 104729)
    ]
    # One of each kind first, for when time is short.
    return [encoded[0], raw[0], *encoded[1:], raw[1]]


def references(
    plain: EngineSubject,
    recorder: Recorder,
    prompts: Sequence[BuiltIn],
    budget: Budget,
    share: float,
) -> list[Reference]:
    """Decode the prompts one by one, as many as fit, but three at least.

    Args:
        plain: without MTP.
        recorder: of what it gives.
        prompts: to be answered.
        budget: the time there is.
        share: of what is left of it that this may take.
    """
    deadline = budget.spent() + share * budget.left()
    found: list[Reference] = []
    for number, prompt in enumerate(prompts):
        if number >= _FEWEST and budget.spent() > deadline:
            break
        name = f"reference-{number}"
        plain.answers([_request(name, prompt.ids, top_logprobs=2)])
        told = [logprobs for output in recorder.outputs[name] for logprobs in output.logprobs]
        gaps = tuple(t.top[0][1] - t.top[1][1] for t in told)
        found.append(Reference(recorder.tokens(name), gaps))
    return found


def compare(
    subject: EngineSubject,
    recorder: Recorder,
    prompts: Sequence[BuiltIn],
    expected: Sequence[Reference],
) -> Equality:
    """Submit the prompts at once and compare their answers.

    Args:
        subject: an engine.
        recorder: of what it gives.
        prompts: as many as there are references.
        expected: plain answers.

    Raises:
        MlxMtpError: the engine failed.
    """
    requests = [_request(f"equality-{i}", prompt.ids) for i, prompt in enumerate(prompts)]
    subject.answers(requests)
    counters = SpeculationCounters()
    partings: list[Parting] = []
    identical = 0
    for number, (request, reference) in enumerate(zip(requests, expected, strict=True)):
        for output in recorder.outputs[request.request_id] if prompts[number].is_chat else ():
            counters.observe(output.num_draft_tokens, output.num_accepted_tokens)
        at = _first_difference(recorder.tokens(request.request_id), reference.tokens)
        identical += len(reference.tokens) if at is None else at
        if at is not None:
            gap = reference.gaps[at] if at < len(reference.gaps) else None
            partings.append(Parting(number, at, gap))
    return Equality(
        name=subject.name,
        answers=len(requests),
        tokens=sum(len(reference.tokens) for reference in expected),
        identical=identical,
        partings=tuple(partings),
        accepted=tuple(n / counters.num_drafts for n in counters.num_accepted_tokens_per_pos),
    )


def _request(name: str, prompt: tuple[int, ...], top_logprobs: int | None = None) -> Request:
    sampling = SamplingParams(max_tokens=_MOST_TOKENS, temperature=0.0, top_logprobs=top_logprobs)
    return Request(name, prompt, sampling)


def _first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first place where they differ, an end too; None if they don't."""
    if tuple(got) == tuple(expected):
        return None
    pairs = enumerate(zip(got, expected))
    return next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
