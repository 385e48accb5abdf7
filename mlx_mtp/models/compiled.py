"""Compiles methods of modules with mlx, once for all modules that differ only in their arrays.

The GPU waits while the host builds the graph of a decode step or of a prompt's chunk. A compiled
function takes a tenth of that time. A layer's weights are arguments of the compiled function, so a
new shape is traced once for each kind of layer, not once for each layer.
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

# Maximum number of traces of a compiled function, by `of_step()`. A trace takes 45 kB, a prompt's
# 90 kB, and mlx frees none while the function lives.
_MOST_TRACES = {None: 1024, True: 1024, False: 128}

Methods = dict[str, Callable[..., Any]]

_compiled: dict[Hashable, Methods] = {}  # by methods, arrays' shapes and dtypes, and `_facts`
_tracing = threading.RLock()  # The engines of one process share the twins.


def compiled(module: nn.Module, *names: str) -> Methods:
    """Returns compiled versions of a module's methods, by name.

    The methods' arguments and results must be arrays, numbers, and tuples of these.
    """
    slots = list(_slots(module))
    arrays = [owner[key] for owner, key in slots]
    kind = names, *((key, a.shape, a.dtype) for (_, key), a in zip(slots, arrays)), *_facts(module)
    if kind not in _compiled:
        twin = _twin(module)
        _compiled[kind] = {name: _Compiled(twin, name).run for name in names}
    return {name: partial(method, arrays) for name, method in _compiled[kind].items()}


class _Compiled:
    def __init__(self, twin: nn.Module, name: str) -> None:
        self._slots, self._method = list(_slots(twin)), getattr(twin, name)
        self._runs: dict[bool | None, Callable[..., Any]] = {}
        self._num_traces: Counter[bool | None] = Counter()

    # mlx gets `arrays` last, as it compares the shapes of all arguments in order. For equal numbers
    # of tokens a decode step runs other operations than a prompt: each `of_step()` has its traces.
    def run(self, arrays: list[mx.array], *args: Any) -> Any:
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
    """Returns a copy of a module and its submodules, in which tracing replaces the arrays."""
    twin = copy.copy(module)
    for name, child in twin.items():
        if isinstance(child, nn.Module):
            twin[name] = _twin(child)
    return twin


def _slots(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields the owner and name of each array in a module."""
    for key, value in module.items():
        if isinstance(value, nn.Module):
            yield from _slots(value)
        elif isinstance(value, mx.array):
            yield module, key
        else:
            assert value is None, "a layer's arrays and modules are its own, and in no lists"


def _facts(module: nn.Module) -> Iterator[Any]:
    """Yields everything, except arrays, in which two modules can differ."""
    yield type(module)
    for name, value in sorted(vars(module).items()):
        yield name, value if isinstance(value, Hashable) else repr(value)
    for name, child in module.items():
        if isinstance(child, nn.Module):
            yield name
            yield from _facts(child)
