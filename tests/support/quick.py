"""The choice of cases for the quick run; the full run has all."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest

full = partial(pytest.param, marks=pytest.mark.full)


def diagonal(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by a product; the quick run covers each value of each factor."""
    longest = max(map(len, factors.values()))
    quick = [tuple(values[i % len(values)] for values in factors.values()) for i in range(longest)]
    return _parametrize(factors, quick)


def pairwise(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by a product; the quick run covers all pairs of values of different factors."""
    return _parametrize(factors, [tuple(case.values()) for case in covering(factors)])


def _parametrize(
    factors: dict[str, Sequence[Any]], quick: Iterable[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    cases = [case if case in quick else full(*case) for case in product(*factors.values())]
    return pytest.mark.parametrize(tuple(factors), cases)


def covering(factors: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns a few cases that cover all pairs of values of different factors."""
    left = {
        frozenset([(a, x), (b, y)]): None
        for a, b in combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    }
    cases = []
    while left:
        case = dict(sorted(next(iter(left)), key=str))
        for name, values in factors.items():
            if name not in case:
                met = [sum(frozenset([(name, v), o]) in left for o in case.items()) for v in values]
                case[name] = values[met.index(max(met))]
        for pair in combinations(case.items(), 2):
            left.pop(frozenset(pair), None)
        cases.append({name: case[name] for name in factors})
    return cases
