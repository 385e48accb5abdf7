"""Methods of modules compiled by mlx, once for all modules that differ in their arrays alone.

In a step of few rows a GPU waits for the host, which builds the graph anew at each step. A compiled
function is repeated in a tenth of the time; with a layer's weights among its arguments, a new shape
is traced for one layer of each kind and not for all.
"""

import copy
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.kernels.gpu import of_step

_MOST_TRACES = 1024  # of 45 kB each; mlx drops none as long as a function lives

Methods = dict[str, Callable[..., Any]]

_compiled: dict[Hashable, Methods] = {}  # by kind


def compiled(module: nn.Module, *names: str) -> Methods:
    """Methods of this module; what they get and return are arrays, numbers, and tuples of these."""
    slots = list(_slots(module))
    arrays = [owner[key] for owner, key in slots]
    kind = names, *((key, a.shape, a.dtype) for (_, key), a in zip(slots, arrays)), *_facts(module)
    if kind not in _compiled:
        twin = _twin(module)
        _compiled[kind] = {name: _Compiled(twin, name) for name in names}
    return {name: partial(method, arrays=arrays) for name, method in _compiled[kind].items()}


class _Compiled:
    def __init__(self, twin: nn.Module, name: str) -> None:
        self._slots, self._method = list(_slots(twin)), getattr(twin, name)
        self._num_traces, self._run = 0, mx.compile(self._trace)

    # The arrays are the last, as mlx compares the shapes of all arguments in their order. A step's
    # products are not those of a prompt of as many tokens: what is traced depends on `of_step`.
    def __call__(self, *args: Any, arrays: list[mx.array]) -> Any:
        if self._num_traces > _MOST_TRACES:
            self._num_traces, self._run = 0, mx.compile(self._trace)
        return self._run(*args, of_step(), arrays)

    def _trace(self, *args: Any) -> Any:
        self._num_traces += 1
        *own, _, arrays = args
        for (owner, key), array in zip(self._slots, arrays, strict=True):
            owner[key] = array
        return self._method(*own)


def _twin(module: nn.Module) -> nn.Module:
    """A copy whose arrays may be replaced."""
    twin = copy.copy(module)
    for name, child in twin.items():
        if isinstance(child, nn.Module):
            twin[name] = _twin(child)
    return twin


def _slots(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where this module and those in it have arrays."""
    for key, value in module.items():
        if isinstance(value, nn.Module):
            yield from _slots(value)
        elif isinstance(value, mx.array):
            yield module, key
        else:
            assert value is None, "a layer's arrays and modules are its own, and in no lists"


def _facts(module: nn.Module) -> Iterator[Any]:
    """All that is no array and may make modules differ."""
    yield type(module)
    for name, value in sorted(vars(module).items()):
        yield name, value if isinstance(value, Hashable) else repr(value)
    for name, child in module.items():
        if isinstance(child, nn.Module):
            yield name
            yield from _facts(child)
