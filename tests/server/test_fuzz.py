"""Random changes to good requests: the answer is 200 or 4xx, an error has the API's shape."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import MODEL
from tests.server.test_exchanges import APIS, GROUPS
from tests.support.in_process import in_process
from tests.support.raw_http import error_of

# Recorded requests of all APIs that succeed.
GOOD: list[tuple[str, dict[str, Any]]] = [
    (path, {"model": MODEL, **smallest, **exchange["fields"]})
    for group in GROUPS
    for exchange in group["exchanges"]
    for path, smallest in [APIS[exchange["api"]]]
    if not group["said"].startswith("(")
]
_PATH, _SMALLEST = APIS["chat"]
_OWN = {"mtp": {"num_draft_tokens": 2, "optimistic": 0.5, "trace": True}, "return_progress": True}
GOOD.append((_PATH, {"model": MODEL, **_SMALLEST, "stream": True, **_OWN}))
TOKENS = [
    *(b"[", b"]", b"{", b"}", b'"', b",", b":", b"\\", b"\\u", b"\\ud800", b"\xff", b"\x00"),
    *(b"NaN", b"1e999", b"-", b"0" * 400, b"[" * 300, b'{"a":' * 300, b"null", b"\xef\xbb\xbf"),
]

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "<|im_end|>", "</think>", "<tool_call>", "{{ 1 }}", "\x00", "a" * 600]),
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([-1, 0, 1, 1 << 31, 1 << 63, 1 << 64, 10**30, -(1 << 63), 1e308, 5e-324, -0.0]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each place that can be changed: an object or list, and each of its keys."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from places(inner)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draws a good body with one to three changes, and a route, which is mostly its own."""
    path, good = draw(st.sampled_from(GOOD))
    body = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        where = list(places(body))
        if not where:
            break
        holder, key = draw(st.sampled_from(where))
        old = holder[key]
        change = draw(st.sampled_from(["replace", "remove", "repeat", "graft", "rename", "wrap"]))
        if change == "replace":
            holder[key] = draw(VALUES)
        elif change == "remove":
            del holder[key]
        elif change == "repeat" and isinstance(old, list | str):
            holder[key] = old * draw(st.integers(0, 40))
        elif change == "graft":
            other, place = draw(st.sampled_from(list(places(draw(st.sampled_from(GOOD))[1]))))
            holder[key] = copy.deepcopy(other[place])
        elif change == "rename" and isinstance(key, str):
            holder[draw(TEXTS)] = holder.pop(key)
        elif change == "wrap":
            holder[key] = draw(st.sampled_from([[old], {"type": old}, [old] * 3]))
    other_path = st.sampled_from([path] * 9 + [other for other, _ in GOOD])
    return draw(other_path), json.dumps(body).encode()


def spoilt(content: bytes, tokens: list[bytes], chance: random.Random) -> bytes:
    """Returns the content with some bytes replaced, cut out, repeated or inserted."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(content) + 1)
        end = min(len(content), start + chance.choice([0, 0, 1, 1, 2, 10, 100]))
        middle = chance.choice([b"", content[start:end] * 2, chance.choice(tokens)])
        content = content[:start] + middle + content[end:]
    return content


@st.composite
def spoilt_bytes(draw: st.DrawFn) -> tuple[str, bytes]:
    path, good = draw(st.sampled_from(GOOD))
    return path, spoilt(json.dumps(good).encode(), TOKENS, draw(st.randoms()))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with in_process() as client:
        yield client


@pytest.mark.parametrize("strategy", [mutated(), spoilt_bytes()], ids=["values", "bytes"])
@pytest.mark.parametrize("examples", [250, pytest.param(20_000, marks=pytest.mark.full)])
def test_changes_to_good_bodies(client: httpx.Client, strategy: Any, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(strategy)
    def run(case: tuple[str, bytes]) -> None:
        path, content = case
        response = client.post(path, content=content)
        assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
        if response.status_code != 200:
            error_of(response, path)

    run()
    assert client.get("/health").status_code == 200
