"""Compiles a module's method with mlx, once for all modules that differ only in their arrays.

The GPU waits while the host builds the graph of a decode step or of a prompt's chunk. A compiled
function takes a tenth of that time. A module's weights are arguments of the compiled function, so a
new shape is traced once for each kind of module.
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
from mlx_mtp.models.gemm.routes import all_served
from mlx_mtp.models.gemm.stacks import unstack

# Maximum number of traces of a compiled function, by `of_step()`. A trace takes 45 kB a layer, a
# prompt's 90 kB, and mlx frees none while the function lives.
_MOST_TRACES = {None: 384, True: 384, False: 48}

Slot = tuple[nn.Module, str]  # the owner and name of an array

# By a method's name, the arrays' places, shapes and dtypes, and `_facts`.
_compiled: dict[Hashable, "_Compiled"] = {}
_tracing = threading.RLock()  # The engines of one process share the twins.


def compiled(module: nn.Module, name: str) -> Callable[..., Any]:
    """Returns a compiled version of a module's method.

    Its arguments and results must be trees of arrays and numbers; the first argument is an array
    with an item per token.
    """
    slots = {of_stacks: _slots(module, of_stacks) for of_stacks in (False, True)}
    arrays = {of_stacks: [array for array, _ in each] for of_stacks, each in slots.items()}
    places = ((array, [key for _, key in owners]) for array, owners in slots[True])
    kind = name, *((*keys, a.shape, a.dtype) for a, keys in places), *_facts(module)
    if kind not in _compiled:
        _compiled[kind] = _Compiled(_twin(module), name)
    return partial(_compiled[kind].run, arrays)


class _Compiled:
    def __init__(self, twin: nn.Module, name: str) -> None:
        self._twin, self._method = twin, getattr(twin, name)
        self._slots = {of_stacks: _slots(twin, of_stacks) for of_stacks in (False, True)}
        self._served: dict[int, bool] = {}  # by the number of tokens
        self._runs: dict[bool | None, Callable[..., Any]] = {}
        self._num_traces: Counter[bool | None] = Counter()

    # mlx gets the arrays last, as it compares the shapes of all arguments in order. For equal
    # numbers of tokens a decode step runs other operations than a prompt: each `of_step()` has its
    # traces.
    def run(self, arrays: dict[bool, list[mx.array]], *args: Any) -> Any:
        kind = of_step()
        run = self._runs.get(kind)
        if run is None:
            run = self._runs[kind] = mx.compile(self._trace)
        return run(*args, arrays[kind is True and self._takes_stacks(len(args[0]))])

    def _takes_stacks(self, rows: int) -> bool:
        if rows not in self._served:
            self._served[rows] = all_served(self._twin, rows)
        return self._served[rows]

    def _trace(self, *args: Any) -> Any:
        kind = of_step()
        self._num_traces[kind] += 1
        if self._num_traces[kind] > _MOST_TRACES[kind]:
            self._num_traces[kind] = 0
            self._runs.pop(kind, None)  # The next call begins anew.
        *arguments, arrays = args
        of_stacks = kind is True and self._takes_stacks(len(args[0]))
        with _tracing:
            for (_, owners), array in zip(self._slots[of_stacks], arrays, strict=True):
                for owner, key in owners:
                    owner[key] = array
            if of_stacks:
                for layer in self._twin.modules():
                    if "_weight" in layer:
                        unstack(layer)
            return self._method(*arguments)


def _twin(module: nn.Module) -> nn.Module:
    """Returns a copy of a module and its submodules, in which tracing replaces the arrays."""
    twin = copy.copy(module)
    for name, child in twin.items():
        if isinstance(child, nn.Module):
            twin[name] = _twin(child)
    return twin


def _slots(module: nn.Module, of_stacks: bool) -> list[tuple[mx.array, list[Slot]]]:
    """Returns the arrays of a module, each with its places, that a pass takes as arguments.

    Of stacked weights (see `gemm.stacks`) a decode step that the kernel serves takes only the
    stacks, as each argument takes the host time; other passes also use the layers' own arrays.
    """
    slots: dict[int, tuple[mx.array, list[Slot]]] = {}
    for owner in _owners(module):
        for key, value in owner.items():
            if isinstance(value, mx.array):
                if not (of_stacks and f"_{key}" in owner):
                    slots.setdefault(id(value), (value, []))[1].append((owner, key))
            else:
                assert value is None or isinstance(value, nn.Module), "all arrays are in modules"
    return [*slots.values()]


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.values():
        if isinstance(child, nn.Module):
            yield from _owners(child)


def _facts(module: nn.Module) -> Iterator[Any]:
    """Yields everything, except arrays and private attributes, in which two modules can differ."""
    yield type(module)
    for name, value in sorted(vars(module).items()):
        if not name.startswith("_"):
            yield name, value if isinstance(value, Hashable) else repr(value)
    for name, child in module.items():
        if isinstance(child, nn.Module):
            yield name
            yield from _facts(child)
