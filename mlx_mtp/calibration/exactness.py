"""Checks, when a model is loaded, whether answers are exact on this machine, and at what cost.

On CUDA the checks of the kernels suffice. On Metal, which the authors have not run, each operation
of a decode step is computed for rows alone and beside others, then steps of the whole model, and
the bits are compared. A result without faults is kept for the next start.
"""

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
from pydantic import BaseModel

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.cache.specs import AttentionSpec, GatedDeltaSpec
from mlx_mtp.calibration.cost_file import fingerprint
from mlx_mtp.kept import keep_json
from mlx_mtp.kernels import attention, cases, gpu
from mlx_mtp.kernels.row_check import row_problem
from mlx_mtp.models.gemm.exact import batch_invariant, exact_cost, one_order_faults
from mlx_mtp.models.gemm.measure import kinds_of, timed
from mlx_mtp.models.model import LoadedModel

logger = logging.getLogger(__name__)

MOST_COST = 0.05  # share of a plain step that exact answers may cost and still be the default
MOST_SECONDS = 5.0  # duration of a check, unless --exact is given
_ROWS = (1, 2, 4, 8)  # numbers of rows of the steps that are compared
_TIMED_ROWS = (1, 4)  # a plain step of one row; one with three drafts, or of four rows
_TIMED_KEYS, _CALLS = 2048, 8  # keys of the timed attention, and calls per measurement
_PROMPT, _TOKENS = 7, 4  # maximum tokens of a row's prompt; tokens after it
_FORMAT = 1


class Exactness(BaseModel):
    """The result of a check."""

    checked: list[str]  # names of operations
    faults: dict[str, str]  # by operation, why a row's bits depend on more than the row
    # By number of rows: the added time of a step's products and attention, as a share.
    costs: dict[int, float]
    seconds: float

    @property
    def default(self) -> bool:
        """True if answers are exact unless a flag says otherwise."""
        return not self.faults and max(self.costs.values(), default=0.0) <= MOST_COST

    def text(self, exact: bool) -> str:
        """Returns a sentence for the banner; `exact`: the mode is on."""
        if self.faults:
            name, why = next(iter(self.faults.items()))
            more = f", and {len(self.faults) - 1} more" if len(self.faults) > 1 else ""
            differ = "Answers can differ where two tokens are about equally likely"
            return f"not exact, {name}: {why}{more}. {differ}"
        cost = max(self.costs.values(), default=0.0)
        found = f"{len(self.checked)} operations and whole steps compared on this machine"
        if exact:
            return f"{found}, {cost:+.0%} of a step"
        return f"--exact makes them the same to the bit ({found}), for {cost:+.0%} of a step"


def decide_exact(model: LoadedModel, wanted: bool | None, folder: Path | None = None) -> bool:
    """Returns whether answers will be exact: by the flag `wanted`, or by a check if it is None."""
    exact = model.resolve_exact(wanted)
    most = MOST_SECONDS if wanted is None else math.inf
    found = exactness_of(model, folder, most) if exact else None
    return exact if found is None or wanted is not None else found.default


def expect_exact(model: LoadedModel, wanted: bool | None, folder: Path | None) -> bool:
    """Returns the expected result of `decide_exact`, before the weights are read."""
    exact = model.resolve_exact(wanted)
    if not exact or wanted is not None or gpu.backend() != "metal":
        return exact
    found = _recalled(model, _path(model, folder))
    return found is None or found.default


def exactness_of(
    model: LoadedModel, folder: Path | None = None, most: float = math.inf
) -> Exactness | None:
    """Returns the result of the check of a loaded model, made now or at an earlier start.

    None if there is nothing to check: on CUDA, or if answers can't be exact. An error in the check
    counts as a fault, and so does reaching the limit of `most` seconds.
    """
    if gpu.backend() != "metal" or not model.can_be_exact:
        return None
    if (known := known_exactness(model)) is not None:
        return known
    path = _path(model, folder)
    if (found := _recalled(model, path)) is not None:
        return found
    found = vars(model.model)["exactness"] = _checked(model, most)
    if path is not None and not found.faults:
        _write(path, found)
    for name, why in found.faults.items():
        logger.warning("Answers are not exact, %s: %s", name, why)
    return found


def known_exactness(model: LoadedModel) -> Exactness | None:
    """Returns the result of an earlier call of `exactness_of` for a model, or None."""
    found: Exactness | None = vars(model.model).get("exactness")
    return found


def _checked(model: LoadedModel, most: float) -> Exactness:
    began = perf_counter()
    checked, faults, costs = list[str](), dict[str, str](), dict[int, float]()

    def in_time() -> None:
        if perf_counter() - began > most:
            raise TimeoutError(
                f"it ended after {most:.0f} s, with {len(checked)} operations compared; --exact "
                "gives it the time that it takes"
            )

    try:
        for name, problem in _checks(model, in_time):
            in_time()
            if (fault := _fault(problem)) is not None:
                faults[name] = fault
            checked.append(name)
        for rows in _TIMED_ROWS if not faults else ():
            in_time()
            costs[rows] = _cost(model, rows)
    except TimeoutError as late:
        faults["the check"] = str(late)
    except Exception as error:
        faults["the check itself"] = f"{type(error).__name__}: {error}"
    return Exactness(checked=checked, faults=faults, costs=costs, seconds=perf_counter() - began)


def _fault(problem: Callable[[], str | None]) -> str | None:
    try:
        return problem()
    except TimeoutError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _checks(
    model: LoadedModel, in_time: Callable[[], None]
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Yields the operations of a decode step with functions that return why they are not exact.

    Whole steps come last. Long checks call `in_time`, which raises TimeoutError at the limit.
    """
    faults = one_order_faults(model.model, model.dtype, in_time)
    for kind in kinds_of(model.model, model.dtype):
        _, shapes = kind
        (codes, form), *_ = shapes
        inputs = codes[-1] * 32 // form.bits
        name = f"product of {inputs} by {codes[-2]}, {form.mode} of {form.bits} bits"
        name += f" in groups of {form.group_size}" + (", gate and up" if len(shapes) > 1 else "")
        yield name, lambda kind=kind: faults.get(kind)  # type: ignore[misc]
    for case in _kernel_cases(model):
        name = f"{case.operation.name.replace('_', ' ')} {tuple(case.shape)}"
        yield name, lambda case=case: row_problem(case)  # type: ignore[misc]
    yield "a whole step", lambda: _step_problem(model, in_time)


def _kernel_cases(model: LoadedModel) -> list[cases.KernelCase]:
    found = cases.layer_cases(model.causal_lm.args, model.dtype)
    recurrent = [s for s in model.layer_specs if isinstance(s, GatedDeltaSpec)]
    own = [s for s in model.layer_specs if isinstance(s, AttentionSpec)]
    for spec in recurrent[:1]:
        found += cases.recurrence_cases(spec.shape, model.dtype)
    for each in own[:1]:
        found += cases.attention_cases((each.heads, each.kv_heads, each.head_dim), model.dtype)
    return found


class _Row(NamedTuple):
    prompt: list[int]
    tokens: list[int]  # after the prompt
    logits: list[mx.array]  # after each of `tokens`, computed alone and one by one


def _step_problem(model: LoadedModel, in_time: Callable[[], None]) -> str | None:
    """Compare steps of the whole model: rows alone, token by token, and windows of several rows.

    One token of a first window is kept, which a second window folds into the states.
    """
    with batch_invariant(model.model, model.dtype):
        rows = list[_Row]()
        for number in range(_ROWS[-1]):
            count = _PROMPT + _TOKENS - number % 3
            ids = [(97 * (number + 1) + 7919 * i) % model.vocab_size for i in range(count)]
            rows.append(_Row(ids[:-_TOKENS], ids[-_TOKENS:], []))
            steps = _Steps(model, [rows[-1].prompt], in_time)
            for token in rows[-1].tokens:
                logits = steps.window([[token]], [1], is_kept=True)
                rows[-1].logits.append(logits[0])
        for count in _ROWS:
            some = rows[:count]
            steps = _Steps(model, [row.prompt for row in some], in_time)
            # Windows with rejected drafts, of different lengths, then windows of the right tokens.
            wrong = [[row.tokens[0], *[1] * (n % 4)] for n, row in enumerate(some)]
            first = steps.window(wrong, [1] * count)
            lengths = [1 + n % (_TOKENS - 1) for n in range(count)]
            right = [row.tokens[1 : 1 + n] for row, n in zip(some, lengths)]
            second = steps.window(right, lengths)
            for number, row in enumerate(some):
                begin = sum(map(len, wrong[:number]))
                pairs = [(first[begin], row.logits[0])]
                begin = sum(lengths[:number])
                pairs += [(second[begin + i], row.logits[1 + i]) for i in range(lengths[number])]
                for place, (found, true) in enumerate(pairs):
                    if not mx.array_equal(found, true).item():
                        return f"a row of {count} has other bits than alone, at its token {place}"
    return None


class _Steps:
    """Rows of prompts, each computed alone as one window, and decode steps after them."""

    def __init__(
        self, model: LoadedModel, prompts: list[list[int]], in_time: Callable[[], None]
    ) -> None:
        self._model, self._lengths = model, [len(prompt) for prompt in prompts]
        self._in_time = in_time
        caches = [model.make_cache(1) for _ in prompts]
        for cache, prompt in zip(caches, prompts):
            count = mx.array([len(prompt)], dtype=mx.int32)
            self._run(cache, [prompt], [len(prompt)], count)
            cache.commit(count)
        self._cache = caches[0]
        for other in caches[1:]:
            self._cache.extend(other)

    def window(self, tokens: list[list[int]], kept: list[int], is_kept: bool = False) -> mx.array:
        """Returns logits [N, V] of a window with `tokens` of each row; `kept` of them are kept."""
        num_kept = mx.array(kept, dtype=mx.int32)
        limits = [length + len(own) for length, own in zip(self._lengths, tokens)]
        logits = self._run(self._cache, tokens, limits, num_kept if is_kept else None)
        self._cache.commit(num_kept)
        self._lengths = [length + n for length, n in zip(self._lengths, kept)]
        return logits

    def _run(
        self, cache: BatchCache, tokens: list[list[int]], limits: list[int], kept: mx.array | None
    ) -> mx.array:
        self._in_time()
        cache.reserve(limits)
        cache.begin_window([len(own) for own in tokens], kept)
        ids = mx.array([token for own in tokens for token in own], dtype=mx.int32)
        logits = self._model.logits(self._model.hidden(ids, cache))
        mx.eval(logits)  # so that `in_time` sees the time of the computation
        return logits


def _cost(model: LoadedModel, rows: int) -> float:
    """Returns the added time of a step's products and attention if it is exact, as a share."""
    ours, best = exact_cost(model.model, model.dtype, rows)
    own = [s for s in model.layer_specs if isinstance(s, AttentionSpec)]
    if own:
        spec = own[0]
        buffer = mx.zeros((2 * spec.kv_heads * _TIMED_KEYS, spec.head_dim), dtype=model.dtype)
        shape = rows, spec.heads, spec.head_dim
        queries = mx.random.normal(shape, key=mx.random.key(0)).astype(model.dtype)
        positions = mx.arange(_TIMED_KEYS - rows, _TIMED_KEYS, dtype=mx.int32)
        scale, slots = spec.head_dim**-0.5, ((0, 0, _TIMED_KEYS, 0, rows),)
        kv = buffer.reshape(2, 1, spec.kv_heads, _TIMED_KEYS, spec.head_dim)
        given = queries, positions, [buffer], spec.kv_heads, slots, rows, scale, True
        mask = mx.arange(_TIMED_KEYS) <= positions[None, None, :, None]
        by_mlx = queries[None], kv, positions[None], lambda: mask, _TIMED_KEYS, 0, None, scale
        ours += len(own) * _seconds(lambda: attention.attend_windows(*given))
        best += len(own) * _seconds(lambda: attention.attend_rectangle(*by_mlx))
    return ours / best - 1


def _seconds(launch: Callable[[], mx.array | None]) -> float:
    """Returns the time of one of several launches; that of a single one is mostly the host's."""
    return timed(lambda: [launch() for _ in range(_CALLS)])[1] / _CALLS


def _path(model: LoadedModel, folder: Path | None) -> Path | None:
    """The file's name depends on all that the check depends on: model, chip, system and mlx."""
    if folder is None:
        return None
    return folder / f"exactness-{fingerprint(model, None, [str(_FORMAT)])[:32]}.json"


def _recalled(model: LoadedModel, path: Path | None) -> Exactness | None:
    """Returns the result that an earlier start kept, or None."""
    if path is None:
        return None
    try:
        found = Exactness.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is not used, and exactness is checked anew: %s", path, error)
        return None
    # Only results without faults are kept.
    vars(model.model).update(exactness=found, one_order_faults={})
    return found


def _write(path: Path, found: Exactness) -> None:
    try:
        keep_json(path, found.model_dump())
    except OSError as error:
        logger.warning("The result of the check of exactness is not kept: %s", error)
