"""The engine alone, without HTTP and detokenization, as a subject to measure."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter, sleep
from typing import Self

from mlx_mtp.bench.answer import Split, TimedAnswer
from mlx_mtp.bench.measure import Asking
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.build import build_engine, run_requests
from mlx_mtp.calibration.exactness import decide_exact
from mlx_mtp.config import DraftTokens, EngineConfig
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.engine.stats import EngineStats
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.text.tokenizer import Tokenizer

OFF = "MTP off"


class EngineSubject:
    """An engine to measure; a context manager that starts and stops it."""

    def __init__(self, name: str, engine: Engine, tokenizer: Tokenizer, asking: Asking) -> None:
        self.name, self.engine, self.asking = name, engine, asking
        self._tokenizer, self._numbers = tokenizer, itertools.count()

    def __enter__(self) -> Self:
        try:
            self.ask([Prompt("Say hello.", seed=0)])  # starts the engine
            # Wait until the idle engine has measured its step costs, which disturbs other engines.
            while self.engine.measuring:
                sleep(0.05)
        except BaseException:
            self.engine.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def ask(self, prompts: Sequence[Prompt]) -> list[TimedAnswer]:
        asking = self.asking
        sampling = SamplingParams(
            asking.max_tokens, temperature=asking.temperature, ignore_eos=asking.ignore_eos
        )
        encode = self._tokenizer.encode_chat
        chats = [
            (encode([{"role": "user", "content": text}]), replace(sampling, seed=seed))
            for text, seed in prompts
        ]
        return [answer for answer, _ in self.ask_token_ids(chats)]

    def ask_token_ids(
        self, prompts: Sequence[tuple[tuple[int, ...], SamplingParams]]
    ) -> list[tuple[TimedAnswer, list[RequestOutput]]]:
        """Like `ask`, for token ids and sampling; returns each answer with its engine outputs."""
        requests = [Request(f"bench-{next(self._numbers)}", *each) for each in prompts]
        timed = {request.request_id: list[tuple[float, RequestOutput]]() for request in requests}
        sent = []

        def submitted() -> Iterator[Request]:
            for request in requests:
                sent.append(perf_counter())
                yield request

        for at, output in run_requests(self.engine, submitted()):
            timed[output.request_id].append((at, output))
        return [
            (_timed_answer(request, at, outputs), [output for _, output in outputs])
            for request, at, outputs in zip(requests, sent, timed.values(), strict=True)
        ]


def engine_subject(
    model: LoadedModel,
    tokenizer: Tokenizer,
    depth: DraftTokens,
    asking: Asking,
    max_num_seqs: int,
    calibration_seconds: float = 0.0,
    draft_ids: Sequence[int] | None = None,
    exact: bool | None = None,  # None: the default of `serve`
) -> EngineSubject:
    """Returns a new engine to measure; engines can share the model. Depth 0 turns MTP off."""
    name = "MTP, auto" if depth == "auto" else f"MTP, k = {depth}"
    if depth == 0:
        name, model, draft_ids = OFF, model.without_head(), None
    exact = decide_exact(model, exact)
    config = EngineConfig(depth, max_num_seqs, calibration_seconds=calibration_seconds, exact=exact)
    ids = tokenizer.eos_token_ids
    engine = build_engine(model, config, tokenizer.vocab_size, ids, draft_ids=draft_ids)
    return EngineSubject(name, engine, tokenizer, asking)


def _timed_answer(
    request: Request, sent: float, timed: Sequence[tuple[float, RequestOutput]]
) -> TimedAnswer:
    chunks = [(at, float(len(output.token_ids))) for at, output in timed if output.token_ids]
    times, tokens = tuple(at for at, _ in chunks), tuple(count for _, count in chunks)
    stats = EngineStats()
    for _, output in timed:
        stats.count_window(output.draft_source, output.num_draft_tokens, output.num_accepted_tokens)
    return TimedAnswer(
        *(sent, timed[-1][0], times, tokens),
        *(int(sum(tokens)), Split.TOLD, len(chunks), len(request.prompt_token_ids)),
        num_drafts=stats.num_draft_tokens,
        num_accepted=stats.num_accepted_tokens,
        drafts=stats.num_draft_tokens_per_pos,
        accepted=stats.num_accepted_tokens_per_pos,
    )
