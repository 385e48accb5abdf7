"""A fault anywhere in a step fails the step's rows; all other streams have the same tokens."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import runner as runner_module
from mlx_mtp.engine.batch import Batch, Batches
from mlx_mtp.engine.health import step_error
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.step import InFlightStep
from mlx_mtp.errors import StepError, StepMemoryError
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.drafter import MTPDrafter
from tests.support.harness import Driver, Plain, greedy, plain, request
from tests.support.tiny_models import VOCAB

FAMILY = "qwen3_next"
MALLOC = "[malloc] Unable to allocate 17179869184 bytes."


def requests() -> list[Request]:
    """Returns eight requests, of which four run and four wait; two prompts take several chunks."""
    lengths = enumerate((3, 5, 40, 2, 7, 37, 4, 6))
    return [
        request(f"r{i}", range(2 + i, 2 + i + n), greedy(9 + i, ignore_eos=True))
        for i, n in lengths
    ]


@pytest.fixture(scope="module")
def expected(tiny_models: dict[str, LoadedModel]) -> dict[str, Plain]:
    return {r.request_id: plain(tiny_models[FAMILY], r, VOCAB) for r in requests()}


class Fuse:
    """Raises once, in the call with this number."""

    def __init__(self, number: int, error: Exception) -> None:
        self.left, self.error = number, error

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


Patch = Callable[[pytest.MonkeyPatch, Fuse], None]


def windows(_: LoadedModel, tokens: mx.array, *caches: BatchCache) -> list[int]:
    """Returns each batch's longest window in a forward pass; 3 in a decode step."""
    return [cache.window.longest for cache in caches]


def before(owner: object, name: str, only: Callable[..., bool] = lambda *_, **__: True) -> Patch:
    """Returns a patch that puts a fuse before a function, for the calls that `only` selects."""

    def patch(monkeypatch: pytest.MonkeyPatch, fuse: Fuse) -> None:
        original = getattr(owner, name)

        def fused(*args, **more):
            if only(*args, **more):
                fuse()
            return original(*args, **more)

        monkeypatch.setattr(owner, name, fused)

    return patch


def on_the_device(owner: object, name: str, only: Callable[..., bool] = lambda *_: True) -> Patch:
    """Returns a patch by which a result depends on an operation that fails only at evaluation."""

    def patch(monkeypatch: pytest.MonkeyPatch, fuse: Fuse) -> None:
        original = getattr(owner, name)

        def spoiled(*args):
            result, meant = original(*args), only(*args)
            try:
                if meant:
                    fuse()
            except Exception:
                weights, row = (mx.zeros(s, dtype=mx.float16) for s in ((2, 4, 4), (1, 1, 4)))
                bad = mx.gather_mm(row, weights, None, mx.array([0]))
                return result + bad.sum().astype(result.dtype)
            return result

        monkeypatch.setattr(owner, name, spoiled)

    return patch


def is_shared(*args) -> bool:
    """Returns True for a forward pass of a chunk together with a decode step."""
    return len(windows(*args)) == 2


PLACES: dict[str, Patch] = {
    "the trunk in a prefill": before(LoadedModel, "hidden", lambda *a: windows(*a) != [3]),
    "the trunk in a decoding step": before(LoadedModel, "hidden", lambda *a: windows(*a) == [3]),
    "the trunk in both": before(LoadedModel, "hidden", is_shared),
    "the device in both": on_the_device(LoadedModel, "hidden", is_shared),
    "logits": before(LoadedModel, "logits"),
    "sampling": before(Sampler, "draw"),
    "verify_window": before(runner_module, "verify_window"),
    "propose": before(MTPDrafter, "propose"),
    "a row's first state": before(MTPDrafter, "make_state"),
    "a new cache": before(LoadedModel, "make_cache"),
    "starting the device": before(ModelRunner, "_propose_and_launch"),
    "filing a prefilled row": before(Batches, "store"),
    "joining": before(Batch, "extend"),
    "reading": before(InFlightStep, "read"),
    "the device": on_the_device(MTPDrafter, "propose"),
}


@pytest.mark.parametrize(
    ("number", "overlap"),
    [(4, True), *(pytest.param(*case, marks=pytest.mark.full) for case in ((1, True), (1, False)))],
)
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_hits_its_rows_alone(tiny_models, expected, monkeypatch, place, number, overlap):
    fuse = Fuse(number, RuntimeError(MALLOC) if number == 1 else ValueError("a bug"))
    config = EngineConfig(num_draft_tokens=2, max_num_seqs=4, prefill_step_size=16, overlap=overlap)
    driver = Driver(tiny_models[FAMILY], vocab_size=VOCAB, config=config)
    PLACES[place](monkeypatch, fuse)
    wanted = requests()
    driver.run_arrivals({0: wanted[:3], 2: wanted[3:6], 5: wanted[6:]})
    assert fuse.left <= 0, "the fault was never met"
    hit = [name for name in expected if driver.reason(name) == "error"]
    for name, reference in expected.items():
        tokens = tuple(driver.tokens(name))
        if name in hit:
            error = driver.outputs[name][-1].error
            assert isinstance(error, StepError)
            # The tokens delivered before the fault are right.
            assert tokens == reference.tokens[: len(tokens)]
            if not place.startswith("the device"):
                assert isinstance(error, StepMemoryError) == (number == 1)
                assert str(fuse.error) in str(error)
        else:
            assert tokens == reference.tokens
            assert driver.reason(name) == "length"
    # Requests that waited were not in the failing step.
    assert 1 <= len(hit) <= 4
    assert driver.core.scheduler.stats().num_requests_running == 0
    driver.core.release()
    assert driver.runner.batches.decoding is None


MEMORY_MESSAGES = (
    MALLOC,
    "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum allowed",
    "[metal::malloc] Resource limit (499000) exceeded.",
    "[METAL] Command buffer failed: Insufficient Memory.",
    "cudaMallocAsync(&data, size) failed: out of memory",
)


def test_want_of_memory_is_told_apart() -> None:
    cases = [(RuntimeError(text), StepMemoryError) for text in MEMORY_MESSAGES]
    cases += [(MemoryError(), StepMemoryError), (ValueError("[metal_kernel]"), StepError)]
    cases += [(RuntimeError("[matmul] Last dimension of first input does not match"), StepError)]
    for error, kind in cases:
        reported = step_error(error)
        assert type(reported) is kind
        assert str(error) in str(reported)


def test_after_a_fault_freed_buffers_go_back(tiny_models, monkeypatch):
    driver = Driver(tiny_models[FAMILY], vocab_size=VOCAB)
    driver.add(request("long", [5, 6], greedy(60, ignore_eos=True)))
    for _ in range(4):
        driver.step()
    PLACES["a new cache"](monkeypatch, Fuse(1, RuntimeError(MALLOC)))
    driver.add(request("hit", [5, 6], greedy(60, ignore_eos=True)))
    driver.step()
    cleared = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    for _ in range(3):
        driver.step()  # A step that only decodes doesn't clear the cache again.
    assert cleared == [1]
    assert driver.reason("hit") == "error"


@pytest.mark.parametrize("cuda", [False, True])
def test_a_long_prompt_is_on_the_device_once_and_cuda_keeps_its_freed_buffers(
    tiny_models, monkeypatch, cuda
):
    """On CUDA, copying the prompt or freeing buffers would wait for the launched chunks."""
    driver = Driver(tiny_models[FAMILY], vocab_size=VOCAB, config=EngineConfig(max_decode_pause=0))
    sequence = driver.add(request("long", [5 + n % 50 for n in range(1600)], greedy(3)))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    cleared, prompts = [], []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    for _ in range(3):
        driver.step()
        prompts.append(driver.core.runner._prompts.ids(sequence))
    assert len(cleared) == (0 if cuda else 3)
    assert all(prompt is prompts[0] for prompt in prompts)
    assert prompts[0].tolist() == [*sequence.prompt, 0]


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError(MALLOC)])
def test_want_of_memory_alone_empties_the_prefix_cache(tiny_models, monkeypatch, error):
    config = EngineConfig(prefix_cache_size=1 << 30)
    driver = Driver(tiny_models[FAMILY], vocab_size=VOCAB, config=config)
    driver.add(request("before", range(5, 25), greedy(8, ignore_eos=True)))
    driver.run()
    PLACES["sampling"](monkeypatch, Fuse(1, error))
    driver.add(request("hit", [5, 6], greedy(8, ignore_eos=True)))
    driver.run()
    assert driver.reason("hit") == "error"
    assert (driver.prefixes.tree.nbytes > 0) == isinstance(error, ValueError)
