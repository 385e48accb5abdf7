"""Exact answers on Metal, emulated: every operation of a decode step runs Metal's kernel's body.

The models are tiny, in 4 bits and bfloat16. mlx computes the rest on the CPU: embeddings, sums of
one row, and everything after the logits.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest

from benchmarks.cores import TellingDrafter
from benchmarks.shapes import build, shape_of
from mlx_mtp.build import build_engine, run_requests
from mlx_mtp.calibration import exactness
from mlx_mtp.calibration.exactness import decide_exact, exactness_of
from mlx_mtp.cli.banner import answers_text
from mlx_mtp.config import EngineConfig
from mlx_mtp.kernels import cases, gpu
from mlx_mtp.kernels.gdn_types import GDNShape
from mlx_mtp.kernels.metal import skinny_gemm as metal_gemm
from mlx_mtp.kernels.row_check import row_problem
from mlx_mtp.models import layers
from mlx_mtp.models.gemm import measure
from mlx_mtp.models.gemm.exact import make_batch_invariant
from mlx_mtp.models.gemm.routes import routes_of
from mlx_mtp.models.gemm.stacks import stack_weights
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from tests.kernels.emulator import EmulatedKernel
from tests.support.harness import Driver, request
from tests.support.quick import covering

END = 2

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "full_attention_interval": 2}
SIZES |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
SIZES |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "max_position_embeddings": 4096}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EXPERTS |= {"shared_expert_intermediate_size": 64}
SHAPES = {"dense": ("Qwen3.5-27B", SIZES), "mixture": ("Qwen3.6-35B-A3B", SIZES | EXPERTS)}


def tiny(name: str) -> LoadedModel:
    """Returns a random model in bfloat16, whose routes have not been chosen."""
    shape, sizes = SHAPES[name]
    config = shape_of(shape, layers=2, tiny=True)
    inner = config["text_config"] | sizes
    rope = inner.get("rope_parameters")
    if rope:
        inner["rope_parameters"] = rope | {"partial_rotary_factor": 1.0}
    mx.random.seed(1)
    model, _ = build(config | {"text_config": inner})
    model.model.set_dtype(mx.bfloat16)
    for module in model.model.modules():
        for key in ("_weight", "_scales", "_biases"):
            module.pop(key, None)
    stack_weights(model.model)  # anew, as a stack's arrays are no parameters
    mx.eval(model.model.parameters())  # here, as an engine reads them on its own thread
    vars(model).pop("dtype", None)
    return model


@pytest.fixture
def metal(emulated, monkeypatch):
    """Makes all modules find a Metal GPU."""
    fake, known = gpu.backend, [layers.backend]
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_mtp.") and vars(module).get("backend") in known:
            monkeypatch.setattr(module, "backend", fake)
    monkeypatch.setattr(EmulatedKernel, "both_orders", False)


on_metal = pytest.mark.parametrize("emulated", ["metal"], indirect=True)


def ready(name: str) -> LoadedModel:
    """Returns a model whose decode steps are exact."""
    model = tiny(name)
    assert model.resolve_exact()
    make_batch_invariant(model.model, model.dtype)
    for module in model.model.modules():
        if hasattr(module, "joins_shared") and routes_of(module.switch_mlp).one_order:
            module.joins_shared = measure._joins(module, model.dtype)
            assert module.joins_shared
    return model


ROWS, LENGTHS = 8, (3, 50, 40, 64, 33, 70, 9, 45)  # maximum rows; tokens of prompts
KINDS = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 20})


class Answers:
    """Requests for a model, each answered alone, without drafts and cache."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        shared = [(5 * i) % 500 + 3 for i in range(30)]
        self.requests = []
        for number, length in enumerate(LENGTHS):
            ids = [(7919 * i + 31 * number) % 500 + 3 for i in range(length)]
            prompt = [*shared, END, *ids][:length] if number % 2 else ids
            sampling = SamplingParams(
                10 + number % 4, seed=number, top_logprobs=2, ignore_eos=True, **KINDS[number % 3]
            )
            self.requests.append(request(f"{number}", prompt, sampling))
        self.texts, self.alone = [[0]] * ROWS, dict[str, object]()
        for number, each in enumerate(self.requests):
            driver = self.driver(0, 1)
            driver.add(each)
            self.alone |= self.bits(driver)
            self.texts[number] = [*each.prompt_token_ids, *driver.tokens(each.request_id)]

    def driver(self, depth: int, rows: int, cache: int = 0) -> Driver:
        config = EngineConfig(
            depth, rows, exact=True, prefix_cache_size=cache, prefill_step_size=32
        )
        drafter = TellingDrafter(self.model, self.texts, 0.6) if depth else None
        model = self.model if depth else self.model.without_head()
        given = {"vocab_size": 512, "stop_ids": (END,), "config": config, "drafter": drafter}
        return Driver(model, **given)

    def bits(self, driver: Driver) -> dict[str, object]:
        driver.run()
        return {
            name: [(token, lp) for out in outputs for token, lp in zip(out.token_ids, out.logprobs)]
            for name, outputs in driver.outputs.items()
        }


@pytest.mark.full
@pytest.mark.timeout(3600)  # emulation is slow, more so on a busy machine
@on_metal
@pytest.mark.parametrize("name", SHAPES)
def test_whole_answers_are_the_same_to_the_bit(metal, name):
    """Tokens and logprobs are equal with drafts (60% right), joins, and cold and warm prefixes."""
    answers, compared, reused = Answers(ready(name)), 0, 0
    factors = {
        "depth": [3, 0, 1, 2, 4, 5],
        "rows": [8, 1, 2, 4],
        "joins": [True, False],
        "warm": [False, True],
    }
    for case in covering(factors):
        driver = answers.driver(case["depth"], case["rows"], case["warm"] << 30)
        asked = answers.requests[: 2 + case["rows"]]
        if case["warm"]:
            for each in asked[1::2]:
                driver.add(replace(each, request_id=f"before {each.request_id}"))
            driver.run()
        places = range(len(asked)) if case["joins"] else [0] * len(asked)
        arrivals = {}
        for place, each in zip(places, asked):
            arrivals.setdefault(place, []).append(each)
        driver.run_arrivals(arrivals)
        found = answers.bits(driver)
        for each in asked:
            reused += driver.reused(each.request_id)
            assert found[each.request_id] == answers.alone[each.request_id], (case, each.request_id)
            compared += len(found[each.request_id])
    assert compared >= 1000 and reused > 0, (compared, reused)


@pytest.mark.full
@pytest.mark.timeout(3600)  # emulation is slow, more so on a busy machine
@on_metal
@pytest.mark.parametrize("planted", [False, True])
def test_the_check_finds_a_dependence_on_the_number_of_rows_and_names_it(
    metal, planted, monkeypatch, tmp_path, caplog
):
    """Only the wrong product is named; the engine answers with and without --exact."""
    if planted:
        gated = metal_gemm._RESULTS[1]
        wrong = [metal_gemm._RESULTS[0], f"(count == 3 ? 1.004f : 1.0f) * ({gated})"]
        monkeypatch.setattr(metal_gemm, "_RESULTS", wrong)
    monkeypatch.setattr(exactness, "_TIMED_ROWS", ())
    model = tiny("dense")
    found = exactness_of(model, tmp_path)
    text = answers_text(EngineConfig(exact=found.default), model)
    if planted:
        ours = "product of 128 by 128, affine of 4 bits in groups of 64, gate and up"
        assert found.faults.keys() == {ours}
        assert text.startswith(f"not exact, {ours}: a row depends on the others")
    else:
        assert found.default and "to the bit" in text and text.startswith("exact: ")
    assert (ours in caplog.text) if planted else "WARNING" not in caplog.text
    assert decide_exact(model, None, tmp_path) == (not planted)
    for wanted in (None, True):
        config = EngineConfig(1, 2, exact=decide_exact(model, wanted, tmp_path))
        engine = build_engine(model, config, 512, (END,), check=True)
        engine.launch()
        asked = request("any", [5, 6, 7], SamplingParams(3, temperature=0.0, ignore_eos=True))
        assert sum(len(output.token_ids) for _, output in run_requests(engine, [asked])) == 3
        engine.stop()
    # The result is kept for the next start, unless there are faults: then that checks again.
    vars(model.model).pop("exactness")
    monkeypatch.setattr(exactness, "_checks", lambda *_: iter(()))
    assert exactness_of(model, tmp_path).checked == ([] if planted else found.checked)


@pytest.mark.full
@pytest.mark.timeout(3600)  # emulation is slow, more so on a busy machine
@on_metal
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_operations_of_a_step_are_independent(metal, dtype):
    """All kernels except products and attention give a row equal bits alone and beside others."""
    args = SimpleNamespace(**SIZES, **EXPERTS, rms_norm_eps=1e-6, norm_topk_prob=True)
    args.partial_rotary_factor, args.rope_theta = 1.0, 1e6
    found = cases.layer_cases(args, dtype)
    found += cases.recurrence_cases(GDNShape(1, 32, 2, 32), dtype)
    compared = [case.operation.name for case in found if row_problem(case) is None]
    assert compared == [case.operation.name for case in found] and len(compared) == 11
