"""The bounds of JSON are exact, for its text and for its value."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.bounded_json import (
    DuplicateNameError,
    JSONBoundError,
    check_text,
    check_value,
    unique_names,
)

VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a",:[]{}\\\n'), max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('b"\\[{'), max_size=3), inner, max_size=4)
    ),
)


def sizes(value: Any) -> tuple[int, int, int, int]:
    """Returns levels; objects, lists and strings; commas; values within objects and lists."""
    if not isinstance(value, dict | list):
        return 0, isinstance(value, str), 0, 0
    inner = [sizes(each) for each in (value.values() if isinstance(value, dict) else value)]
    levels, parts, commas, values = zip((0, 0, 0, 0), *inner)
    names = len(value) if isinstance(value, dict) else 0
    return (
        max(levels) + 1,
        sum(parts) + names + 1,
        sum(commas) + max(len(value) - 1, 0),
        sum(values) + len(value),
    )


@given(VALUES)
def test_what_is_just_within_a_bound_passes_and_one_less_is_refused(value: Any) -> None:
    levels, parts, commas, values = sizes(value)
    text = json.dumps(value).encode()
    check_text(text, levels, parts, commas)
    check_value(value, levels, values)
    for limits, word in (
        ((levels - 1, parts, commas), "levels"),
        ((levels, parts - 1, commas), "strings"),
        ((levels, parts, commas - 1), "values"),
    ):
        if min(limits) >= 0:
            with pytest.raises(JSONBoundError, match=word):
                check_text(text, *limits)
    if levels:
        with pytest.raises(JSONBoundError, match="levels"):
            check_value(value, levels - 1)
    if values:
        with pytest.raises(JSONBoundError, match="values"):
            check_value(value, levels, values - 1)


def test_a_name_that_is_twice_in_an_object_is_told() -> None:
    text = '[{"a": 1, "b": {"a": 2}}, {"c": 1, "d": 2, "c": 3}]'
    with pytest.raises(DuplicateNameError, match=r"the name 'c' twice"):
        json.loads(text, object_pairs_hook=unique_names)
    assert json.loads(text[:24] + "]", object_pairs_hook=unique_names) == [{"a": 1, "b": {"a": 2}}]
