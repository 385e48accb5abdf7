"""No compiled function has an operation on an empty array, which ends the process on CUDA."""

import sys
from functools import wraps

import mlx.core as mx

from mlx_mtp.config import EngineConfig
from mlx_mtp.kernels import gpu
from tests.support.cases import STEP, make_requests
from tests.support.harness import Driver
from tests.support.quick import diagonal
from tests.support.tiny_models import VOCAB


def all_fused():
    """Returns module, name and function of all functions that are compiled on a GPU."""
    code = gpu.fused(lambda: None).__code__
    return [
        (module, name, value)
        for path, module in list(sys.modules.items())
        for name, value in vars(module).items()
        if path.startswith("mlx_mtp.") and getattr(value, "__code__", None) is code
    ]


def shapes_of(function, args):
    """Returns the shapes of all arrays that a function computes from its arguments."""
    found = []

    def rebuilt(*arrays):
        left = iter(arrays)
        given = [next(left) if isinstance(a, mx.array) else a for a in args]
        result = function(*given)
        return result if isinstance(result, mx.array) else tuple(result)

    def note(part):
        if part["type"] == "primitive":
            found.extend(shape for _, shape, _ in part["outputs"])

    mx.export_function(note, rebuilt, *(a for a in args if isinstance(a, mx.array)))
    return found


@diagonal(depth=(None, 0, 2, "auto"), kind=("greedy", "sampled"))
def test_no_compiled_operation_is_on_nothing(tiny_models, monkeypatch, depth, kind):
    model, met, faults = tiny_models["qwen3_5"], set(), set()
    for module, name, function in all_fused():
        plain = function.__wrapped__

        @wraps(plain)
        def checked(*args, name=name, plain=plain):
            met.add(name)
            faults.update(name for shape in shapes_of(plain, args) if 0 in shape)
            return plain(*args)

        monkeypatch.setattr(module, name, checked)
    if depth is None:
        model = model.without_head()
    config = EngineConfig(num_draft_tokens=depth or 0, prefill_step_size=STEP)
    driver = Driver(model, vocab_size=VOCAB, stop_ids=(), config=config)
    driver.run_arrivals({0: make_requests(kind)[:5]})
    sampling = {"_threshold", "_cut", "_add_noise"} if kind == "sampled" else set()
    of_step = {"_accept", "_where_kept"} | ({"_num_kept"} if not depth else set())
    assert of_step | sampling <= met <= {*of_step, "_num_kept", *sampling}
    assert not faults
