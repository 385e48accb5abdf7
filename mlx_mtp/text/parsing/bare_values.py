"""Converts bare text to JSON, for formats that leave a value's type to the tool's schema."""

from collections.abc import Iterator, Mapping
from json.encoder import encode_basestring
from typing import Any

from mlx_mtp.text.parsing.json_reader import begun_value, loads, whole_value

MOST_PARTS = 1024  # maximum schemas within a value's schema to examine
_TYPES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
JSON_TYPES = ("string", "null", *_TYPES.values())


def value_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Returns the JSON types that an object's property may have; empty if the schema has none."""
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
    """Returns the value if it is a list, or else a list with the value."""
    return value if isinstance(value, list) else [value]


def constants(part: Mapping[str, Any]) -> list[Any]:
    """Returns the values that a schema lists (`const`, `enum`)."""
    return [part["const"]] if "const" in part else as_list(part.get("enum", []))


def subschemas(
    root: Mapping[str, Any], part: object, *keywords: str
) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and the schemas under these keywords within it; follows references."""
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
    """Returns the part of the schema that `#/$defs/...` refers to; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place: Any = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def type_of(value: object) -> str:
    """Returns the JSON type of a value; "integer" for numbers that are written as integers."""
    return "null" if value is None else _TYPES.get(type(value), "string")


def json_text(text: str, types: frozenset[str]) -> str:
    """Returns the JSON text of a value written as bare text; a string if no other type fits."""
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
    if (mended := _mended(bare, types)) is not None:
        return mended
    return begun_string(text) + '"'


def _type_of_text(text: str) -> str:
    try:
        return type_of(loads(text))
    except ValueError:
        return "string"


def _mended(text: str, types: frozenset[str]) -> str | None:
    """Repair an object or a list that is invalid JSON, or a list with one JSON value per line.

    Returns None if that fails.
    """
    value = whole_value(text) if text[:1] in ("{", "[") else None
    if value is not None and _type_of_text(value) in types:
        return value
    if "array" not in types or "string" in types:
        return None
    values = [_json_of(line.strip().rstrip(",")) for line in text.splitlines() if line.strip()]
    return f"[{', '.join(map(str, values))}]" if values and None not in values else None


def _json_of(line: str) -> str | None:
    try:
        loads(line)
    except ValueError:
        return whole_value(line)
    return line


def begun_json(text: str, certain: str, types: frozenset[str]) -> str:
    """Like `json_text`, for a value that is cut off.

    `certain` is `text` without an end that can be the beginning of the next tag.
    """
    if text.strip()[:1] in ("{", "[") or (types and "string" not in types):
        for candidate in (text.strip(), certain.strip()):
            if candidate[:1] != '"' and (value := begun_value(candidate)) is not None:
                return value
    return begun_string(text) if text else ""


def begun_string(text: str) -> str:
    """Returns the JSON text of a string, without the closing quote."""
    return encode_basestring(text)[:-1]
