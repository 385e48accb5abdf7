"""Methods of modules compiled by mlx, once for all modules that differ only in their arrays.

A GPU waits for the host while that builds the graph of a step or of a prompt's chunk. A compiled
function takes a tenth of the time; with a layer's weights among its arguments, a new shape is
traced for one layer of each kind and not for all.
"""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.kernels.gpu import of_step

# By `of_step`; 45 kB each, 90 of a prompt. mlx drops none as long as the function lives.
_MOST_TRACES = {None: 1024, True: 1024, False: 128}

Methods = dict[str, Callable[..., Any]]

_compiled: dict[Hashable, Methods] = {}  # by kind
_tracing = threading.RLock()  # Engines of one process share the twins.


def compiled(module: nn.Module, *names: str) -> Methods:
    """Methods of a module, whose arguments and results are arrays, numbers, and tuples of these."""
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
        self._runs: dict[bool | None, Callable[..., Any]] = {}
        self._num_traces: Counter[bool | None] = Counter()

    # The arrays are the last, as mlx compares the shapes of all arguments in their order. A step's
    # products are not those of a prompt of as many tokens, so what is traced depends on `of_step`.
    def __call__(self, *args: Any, arrays: list[mx.array]) -> Any:
        kind = of_step()
        if kind not in self._runs or self._num_traces[kind] > _MOST_TRACES[kind]:
            self._num_traces[kind], self._runs[kind] = 0, mx.compile(self._trace)
        return self._runs[kind](*args, arrays)

    def _trace(self, *args: Any) -> Any:
        self._num_traces[of_step()] += 1
        *arguments, arrays = args
        with _tracing:
            for (owner, key), array in zip(self._slots, arrays, strict=True):
                owner[key] = array
            return self._method(*arguments)


def _twin(module: nn.Module) -> nn.Module:
    """A copy whose arrays are replaced while a method is traced."""
    twin = copy.copy(module)
    for name, child in twin.items():
        if isinstance(child, nn.Module):
            twin[name] = _twin(child)
    return twin


def _slots(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The owner and name of each array in a module."""
    for key, value in module.items():
        if isinstance(value, nn.Module):
            yield from _slots(value)
        elif isinstance(value, mx.array):
            yield module, key
        else:
            assert value is None, "a layer's arrays and modules are its own, and in no lists"


def _facts(module: nn.Module) -> Iterator[Any]:
    """Everything but arrays in which modules may differ."""
    yield type(module)
    for name, value in sorted(vars(module).items()):
        yield name, value if isinstance(value, Hashable) else repr(value)
    for name, child in module.items():
        if isinstance(child, nn.Module):
            yield name
            yield from _facts(child)
