"""Engines that answer the same stories in turns, by wall time and by the processor's time."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

from mlx_mtp.bench.answer import TimedAnswer
from mlx_mtp.bench.measure import Asking, Summary, measure, median, summarize
from mlx_mtp.bench.offline import EngineSubject
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.build import build_engine
from mlx_mtp.config import DraftTokens, EngineConfig
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.text.tokenizer import Tokenizer

CALIBRATION_SECONDS = 30.0  # as `serve` has it
Work = Callable[[int, Prompt], str]


class Contender(EngineSubject):
    """An engine, of which the processor's time is measured too.

    Args:
        name: in tables.
        model: with its head, or without for plain decoding.
        tokenizer: its own.
        depth: drafts a step.
        num_rows: rows at once.
        max_tokens: of each answer, at most.
        draft_ids: the only tokens that are drafted; None: all.
        work: the text of the n-th of some prompts at once, in place of a story's; None: as it is.
        drafts: where they come from, as `--drafts` takes it.
    """

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        tokenizer: Tokenizer,
        depth: DraftTokens,
        num_rows: int,
        max_tokens: int,
        draft_ids: Sequence[int] | None = None,
        work: Work | None = None,
        drafts: str = "mtp,copy",
    ) -> None:
        config = EngineConfig(
            num_draft_tokens=depth,
            drafts=drafts,
            max_num_seqs=num_rows,
            calibration_seconds=CALIBRATION_SECONDS,
        )
        ids = tokenizer.eos_token_ids
        engine = build_engine(model, config, tokenizer.vocab_size, ids, draft_ids=draft_ids)
        super().__init__(name, engine, tokenizer, Asking(max_tokens))
        self.cpu_rates: list[float] = []
        self._work = work

    def ask(self, prompts: Sequence[Prompt]) -> list[TimedAnswer]:
        """As its base; the other engines are idle meanwhile."""
        if self._work is not None:
            prompts = [p._replace(text=self._work(n, p)) for n, p in enumerate(prompts)]
        began = time.process_time()
        answers = super().ask(prompts)
        tokens = sum(answer.num_tokens for answer in answers)
        self.cpu_rates.append(tokens / (time.process_time() - began))
        return answers


def take_turns(
    contenders: Sequence[Contender], num_rows: int, rounds: int, reference: str
) -> dict[str, Summary]:
    """Figures by name: those of `summarize`, and each round's `rates` and `cpu_rates`.

    `cpu_ratio` is the median over the rounds of the ratio to the reference by processor time.
    """
    with contextlib.ExitStack() as stack:
        for contender in contenders:
            stack.enter_context(contender)
        waves = measure(contenders, [("story", num_rows)], rounds, warmups=1, seed=0)
    names = [contender.name for contender in contenders]
    found = {summary["subject"]: summary for summary in summarize(waves, names, reference)}
    for contender in contenders:
        found[contender.name] |= {
            "rates": [wave.rate for wave in waves if wave.subject == contender.name],
            "cpu_rates": contender.cpu_rates[-rounds:],
        }
    for name in names:
        found[name]["cpu_ratio"] = ratio(found, name, reference, "cpu_rates")
    return found


def ratio(found: Mapping[str, Summary], name: str, other: str, rates: str) -> float:
    """The median over the rounds of the ratio of one contender's rates to another's."""
    value = median(a / b for a, b in zip(found[name][rates], found[other][rates], strict=True))
    assert value is not None
    return value
