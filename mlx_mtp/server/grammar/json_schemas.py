"""JSON schemas as clients mean them: no unlisted properties, and bounded white space."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_mtp.sampling.grammar import JSON_WHITESPACE
from mlx_mtp.text.parsing.bare_values import resolved

OPTIONS = "x-guidance"
"""The key of llguidance's options in a schema. A schema that has them is left as it is."""
# Keywords whose subschemas apply to the same value as the schema that has the keyword.
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref")
# Keywords whose subschema is the value's only schema if the keyword stands alone.
_ALONE = ("allOf", "anyOf", "oneOf", "$ref")
_NEGATIVE = ("not", "if")
# A schema with one of these keywords may allow properties that it doesn't list.
_OPEN = {
    *_SAME_VALUE,
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("minProperties", "dependentRequired", "dependencies", "const", "enum"),
    *("$dynamicRef", "$recursiveRef"),
}
_OF_OBJECTS = {"properties", "required", "maxProperties", *_OPEN}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")


def styled(
    schema: Mapping[str, Any],
    *,
    closed: bool | None = None,
    no_whitespace: bool | None = None,
    whitespace: str | None = None,
    as_standard: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Returns the schema with llguidance's options.

    If `closed` (default: unless `as_standard`), objects have listed properties only. `whitespace`
    is a client's pattern for the space between two parts of the JSON, and `no_whitespace` allows
    none. That is not the default, as more answers would be endless: a model that would end a value
    with a line break continues the value.
    """
    if OPTIONS in schema:
        return dict(schema)
    if closed is None:
        closed = not as_standard
    form: dict[str, Any] = {"whitespace_pattern": whitespace or JSON_WHITESPACE}
    if no_whitespace and whitespace is None:
        form = {"whitespace_flexible": False}
    form |= options
    return {**(close_objects(schema) if closed else schema), OPTIONS: form}


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema with objects closed that list properties and don't mention others.

    A closed object has no other properties. An object to which other schemas apply too stays open.
    """
    shared = _sharing_schemas(schema)
    if shared is None:
        return dict(schema)

    def closed(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        copy = dict(node)
        for key, inner in node.items():
            if key in _MAPS and isinstance(inner, dict):
                copy[key] = {name: closed(value) for name, value in inner.items()}
            elif isinstance(inner, list) and (key in _LISTS or key in _SAME_VALUE):
                copy[key] = [closed(value) for value in inner]
            elif key in _SINGLE or key in _SAME_VALUE:
                copy[key] = closed(inner)
        listed, required = node.get("properties"), node.get("required", [])
        if (
            isinstance(listed, dict)
            and id(node) not in shared
            and not _OPEN.intersection(node)
            and isinstance(required, list)
            and all(isinstance(name, str) and name in listed for name in required)
        ):
            copy["additionalProperties"] = False
        return copy

    return dict(closed(schema))


def _sharing_schemas(root: Mapping[str, Any]) -> set[int] | None:
    """Returns the `id()`s of schemas that share their value with other schemas; None: unknown."""
    seen: set[tuple[int, bool, bool]] = set()
    left: list[tuple[Any, bool, bool]] = [(root, True, False)]
    while left:
        node, alone, counted = left.pop()
        if not isinstance(node, dict) or (id(node), alone, counted) in seen:
            continue
        seen.add((id(node), alone, counted))
        left += ((inner, not counted, counted) for inner in _inner_schemas(node))
        beside = _OF_OBJECTS.intersection(node)
        for key in beside.intersection(_SAME_VALUE):
            given = node[key]
            inner = given if isinstance(given, list) else [given]
            if key == "$ref":
                inner = [root if given == "#" else resolved(root, given)]
            elif key == "dependentSchemas" and isinstance(given, dict):
                inner = [*given.values()]
            # Where a schema must not match, a stricter schema could allow more.
            counts = counted or key in _NEGATIVE or (key == "oneOf" and "discriminator" not in node)
            one = key in _ALONE and beside == {key} and (key != "allOf" or len(inner) == 1)
            one = one and alone and not counts
            if inner == [None] and not one:
                return None  # a reference that leads nowhere in the schema
            left += ((each, one, counts) for each in inner)
    return {node for node, alone, _ in seen if not alone}


def _inner_schemas(node: Mapping[str, Any]) -> Iterator[Any]:
    """Yields a schema's subschemas that apply to values within its value."""
    for key, inner in node.items():
        if key in _MAPS and isinstance(inner, dict):
            yield from inner.values()
        elif key in _LISTS and isinstance(inner, list):
            yield from inner
        elif key in _SINGLE:
            yield inner
