"""Text to JSON by a schema: formats that write values as bare text leave their type to it."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

from mlx_mtp.server.parsing import strict_json

_MOST_STEPS = 64
"""Schemas within schemas that are looked at: enough for any honest one, and no cycle lasts."""
JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})


def value_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a property may have; empty: the schema doesn't say.

    Args:
        schema: of an object.
        key: the property's name.
    """
    types: set[str] = set()
    waiting: list[Any] = [_property(schema, key)]
    for _ in range(_MOST_STEPS):
        if not waiting:
            break
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        given = part.get("type")
        names = given if isinstance(given, list) else [given]
        types.update(name for name in names if isinstance(name, str))
        for keyword in ("anyOf", "oneOf", "allOf"):
            inner = part.get(keyword)
            waiting.extend(inner if isinstance(inner, list) else [])
        constants = part["enum"] if isinstance(part.get("enum"), list) else []
        constants = [*constants, part["const"]] if "const" in part else constants
        if given is None:
            types.update(map(type_of, constants))
        waiting.append(resolved(schema, part.get("$ref")))
    return JSON_TYPES & types


def json_text(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that a model wrote as bare text.

    A text that fits none of the types stays a string: the client's own check tells more.
    """
    bare = text.strip()
    kind = type_of(_loaded(bare))
    if not types:
        return bare if kind in ("object", "array") else _string(text)
    if kind == "integer" and "integer" not in types:
        kind = "number"
    if kind in types and kind != "string":
        return bare
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if "null" in types and bare in ("None", ""):
        return "null"
    if kind == "number" and "integer" in types and float(bare).is_integer():
        return str(int(float(bare)))
    if types & {"object", "array"}:
        literal = _python_literal(bare)
        if literal is not None and type_of(json.loads(literal)) in types:
            return literal
    return _string(text)


def _get(value: object, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _property(schema: Mapping[str, Any], key: str) -> Any:
    """A property's schema; that of all others where the property has none."""
    waiting: list[Any] = [schema]
    for _ in range(_MOST_STEPS):
        if not waiting:
            break
        part = waiting.pop()
        properties = _get(part, "properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
        inner = _get(part, "allOf")
        waiting.extend(inner if isinstance(inner, list) else [])
        waiting.append(resolved(schema, _get(part, "$ref")))
    return schema.get("additionalProperties")


def resolved(schema: Mapping[str, Any], reference: object) -> Any:
    """What `#/$defs/...` points at within the schema; None: nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place: Any = schema
    for part in reference[2:].split("/"):
        place = _get(place, part.replace("~1", "/").replace("~0", "~"))
    return place


def type_of(value: object) -> str:
    """The JSON type of a value; "integer" for whole numbers that are written as such."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "string")


def _loaded(text: str) -> Any:
    """The value of a JSON text; a text that is none stands for itself."""
    try:
        return strict_json.loads(text)
    except ValueError:
        return text


def _python_literal(text: str) -> str | None:
    """{'a': True} as JSON: models that know more Python than JSON write such things."""
    if not text.startswith(("{", "[")):
        return None
    try:
        with warnings.catch_warnings():
            # What Python thinks of the escapes in a model's text is nobody's business.
            warnings.simplefilter("ignore")
            literal = json.dumps(ast.literal_eval(text), allow_nan=False)
        strict_json.loads(literal)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return literal


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
