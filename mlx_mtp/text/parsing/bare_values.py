"""Values as bare text to JSON, for formats that leave a value's type to the tool's schema."""

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_mtp.text.parsing.json_reader import begun_value, loads

MOST_PARTS = 1024  # schemas within a value's schema that are looked at
_TYPES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
JSON_TYPES = ("string", "null", *_TYPES.values())


def value_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a property of an object may have; empty if the schema has none."""
    types: set[str] = set()
    properties = (part.get("properties") for part in subschemas(schema, schema, "allOf"))
    values = (each[key] for each in properties if isinstance(each, Mapping) and key in each)
    value = next(values, schema.get("additionalProperties"))
    for part in subschemas(schema, value, "anyOf", "oneOf", "allOf"):
        names = as_list(part.get("type"))
        if names == [None]:
            names = list(map(type_of, constants(part)))
        types.update(name for name in JSON_TYPES if name in names)
    return frozenset(types)


def as_list(value: Any) -> list[Any]:
    """The value if it is a list, else a list of it."""
    return value if isinstance(value, list) else [value]


def constants(part: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists (`const`, `enum`)."""
    return [part["const"]] if "const" in part else as_list(part.get("enum", []))


def subschemas(
    root: Mapping[str, Any], part: object, *keywords: str
) -> Iterator[Mapping[str, Any]]:
    """A schema and the schemas under these keywords within it, with references followed."""
    waiting: list[Any] = [part]
    followed: set[str] = set()
    for _ in range(MOST_PARTS):
        if not waiting:
            return
        part = waiting.pop()
        schema = part if isinstance(part, Mapping) else {}
        yield schema
        for keyword in keywords:
            inner = schema.get(keyword)
            waiting.extend(inner if isinstance(inner, list) else [])
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(resolved(root, reference))


def resolved(root: Mapping[str, Any], reference: object) -> Any:
    """What `#/$defs/...` points at within the schema; None if nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place: Any = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def type_of(value: object) -> str:
    """The JSON type of a value; "integer" for whole numbers that are written as such."""
    return "null" if value is None else _TYPES.get(type(value), "string")


def json_text(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value written as bare text; a string if it fits none of the types."""
    bare = text.strip()
    kind = _type_of_text(bare)
    if not types:
        return bare if kind in ("object", "array") else begun_string(text) + '"'
    if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
        return bare
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if "null" in types and bare in ("None", ""):
        return "null"
    if kind == "number" and "integer" in types and float(bare).is_integer():
        return str(int(float(bare)))
    containers = types & {"object", "array"}
    literal = _python_literal(bare) if containers and bare[:1] in ("{", "[") else ""
    return literal if _type_of_text(literal) in containers else begun_string(text) + '"'


def _type_of_text(text: str) -> str:
    try:
        return type_of(loads(text))
    except ValueError:
        return "string"


def _python_literal(text: str) -> str:
    """A Python literal such as {'a': True}, which some models write, as JSON; "" for others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the model's text
            return json.dumps(ast.literal_eval(text), allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ""


def begun_json(text: str, certain: str, types: frozenset[str]) -> str:
    """As `json_text`, of a value that is cut; `certain` leaves out what may begin the next tag."""
    if text.strip()[:1] in ("{", "[") or (types and "string" not in types):
        for candidate in (text.strip(), certain.strip()):
            if candidate[:1] != '"' and (value := begun_value(candidate)) is not None:
                return value
    return begun_string(text) if text else ""


def begun_string(text: str) -> str:
    """The JSON text of a string, without its closing quote."""
    return json.dumps(text, ensure_ascii=False)[:-1]
