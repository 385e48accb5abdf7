"""Grammars for values that are written as bare text, as in Qwen3-Coder's format.

`text.parsing.bare_values` reads every text that a grammar allows as a value that fits its schema.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mlx_mtp.text.parsing.bare_values import (
    JSON_TYPES,
    MOST_PARTS,
    as_list,
    constants,
    json_text,
    resolved,
    subschemas,
    type_of,
    value_types,
)
from mlx_mtp.text.parsing.json_reader import loads

_SPACE = r"[\s\x1c-\x1f]*"  # What Python takes for white space.
# Texts that would be read as the end of the value, or of the whole call.
_TAGS = (
    rf"<\/parameter>{_SPACE}(<parameter=|<\/function>)",
    rf"<\/function>{_SPACE}<\/tool_call>",
)
ANY_TEXT = " & ".join(["/(?s:.*)/", *(f"~/(?s:.*){tag}(?s:.*)/" for tag in _TAGS)])
"""A terminal in llguidance's Lark: any text without `_TAGS`."""
_JSON_BEGINS = {"integer": "[-0-9]", "number": "[-0-9]", "array": r"\[", "object": r"\{"}
_JSON = frozenset(_JSON_BEGINS)
# Texts that are read as another type than string, or begin like its JSON: if both text and JSON
# could continue, llguidance would choose the text.
_READ_AS = {kind: f"{begins}(?s:.*)" for kind, begins in _JSON_BEGINS.items()} | {
    "null": f"(None|null)?{_SPACE}",
    "boolean": f"(?i:true|false){_SPACE}",
}

_NAME = re.compile(r"(?!\s)[^<>\r\n]+(?<!\s)")  # names that can be read from a tag
_OF_PARAMETERS = ("type", "properties", "required", "additionalProperties")
_FOLLOWED = ("enum", "const", "$ref", "allOf", "anyOf", "oneOf")
_OF_ALL = ("not", "if", "$dynamicRef", "$recursiveRef")
_REFUSED_FOR = {
    **{keyword: {"string", "null", "boolean"} for keyword in _OF_ALL},
    **{keyword: {"string"} for keyword in ("minLength", "maxLength", "pattern", "format")},
}
_BOUND_NOTHING = {"type", "title", "description", "default", "example", "examples", "deprecated"}
BEYOND_TAGS = {
    *("enum", "const", "anyOf", "oneOf", "patternProperties", "propertyNames", "minProperties"),
    *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", *_OF_ALL),
}
"""Keywords of an object's schema that tags can't enforce."""
_MOST_LEVELS = 16
_ALL, _SOME = object(), object()  # all or some values of a type
_Values = frozenset[tuple[str, Any]]  # pairs of a type and one of its values, `_ALL` or `_SOME`


class NotExpressible(Exception):  # noqa: N818 - without `strict` it is no error
    """Raised with a keyword that the grammar or the parser can't enforce."""


def plain_parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool's schema with its top-level references and `allOf` merged.

    Raises NotExpressible if its properties can't be written as tags.
    """
    plain = _definitions(schema)
    for part in _all_parts(schema, schema, "allOf"):
        for key, value in part.items():
            if (
                key in BEYOND_TAGS
                or (key == "$ref" and resolved(schema, value) is None)
                or (key in _OF_PARAMETERS and repr(plain.setdefault(key, value)) != repr(value))
            ):
                raise NotExpressible(key)
    properties, required = plain.get("properties", {}), plain.get("required", [])
    if "object" not in as_list(plain.get("type", "object")):
        raise NotExpressible("type")
    if not isinstance(properties, Mapping) or not all(map(_NAME.fullmatch, properties)):
        raise NotExpressible("properties")
    if not {*map(str, as_list(required))} <= properties.keys():
        raise NotExpressible("required")
    if not properties and plain.get("additionalProperties") not in (None, False, True, {}):
        raise NotExpressible("additionalProperties")
    return plain


def value_forms(schema: Mapping[str, Any], key: str) -> tuple[list[str], dict[str, Any] | None]:
    """Returns a parameter's forms: terminals for bare text, and the schema for JSON or None.

    Raises NotExpressible.
    """
    part, types = schema["properties"][key], value_types(schema, key)
    if types and "string" not in types:
        return [], _whole({"type": sorted(types), **part}, schema)
    read_as = types or frozenset(["string", "array", "object"])
    inner = _all_parts(schema, part, "allOf", "anyOf", "oneOf")
    scalars = [value for each in inner for value in constants(each) if type_of(value) not in _JSON]
    values = {(type_of(value), value) for value in (None, True, False, *scalars)}
    amounts = {(kind, amount) for kind in JSON_TYPES for amount in (_ALL, _SOME)}
    fitting = _fitting(schema, part, frozenset(values | amounts), iter(range(MOST_PARTS)))
    whole = {kind for kind, amount in fitting if amount is _ALL}
    json_types = {kind for kind, amount in fitting if amount is _SOME}
    json_types &= _with_integer(read_as) & _JSON
    terminals = []
    if "string" in whole:
        json_types -= whole
        shut = [f"~/{_SPACE}{_READ_AS[kind]}/" for kind in sorted(read_as - whole)]
        terminals.append(" & ".join([ANY_TEXT, *shut]))
    # The terminal for any text already allows words whose whole type is allowed.
    words = [value for kind, value in fitting - amounts if not {"string", kind} <= whole]
    for value in sorted(words, key=str):
        text = value if isinstance(value, str) else json.dumps(value)
        begins_json = any(re.match(_JSON_BEGINS[kind], text.strip()) for kind in json_types)
        is_read_back = loads(json_text(text, types)) == value
        if is_read_back and not begins_json and not re.search("</(parameter|function)>", text):
            terminals.append(json.dumps(text))
    if not terminals and not json_types:
        raise NotExpressible("enum" if words else "type")
    json_schema = _whole({**part, "type": sorted(json_types)}, schema) if json_types else None
    return terminals, json_schema


def _all_parts(root: Mapping[str, Any], part: object, *keywords: str) -> list[Mapping[str, Any]]:
    schemas = list(subschemas(root, part, *keywords))
    if len(schemas) == MOST_PARTS:
        raise NotExpressible(keywords[0])  # The parser would not visit all parts.
    return schemas


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _whole(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema with the root's definitions; raises NotExpressible for other references."""
    whole = schema | _definitions(root)
    if re.search(r'"\$ref": "(?!#/\$defs/|#/definitions/)', json.dumps(whole)):
        raise NotExpressible("$ref")
    return whole


def _fitting(
    root: Mapping[str, Any], schema: object, values: _Values, steps: Iterator[int], level: int = 0
) -> _Values:
    """Returns those of `values` that fit a schema of `root`; `steps` bounds the schemas visited."""
    if level > _MOST_LEVELS or next(steps, None) is None:
        raise NotExpressible("$ref")
    if isinstance(schema, bool):
        return values if schema else frozenset()
    if not isinstance(schema, Mapping):
        raise NotExpressible("properties")
    names = as_list(schema.get("type", [*JSON_TYPES]))
    if any(name not in JSON_TYPES for name in names):
        raise NotExpressible("type")
    values = frozenset(value for value in values if value[0] in _with_integer(names))
    for keyword, kinds in _REFUSED_FOR.items():
        if keyword in schema and any(kind in kinds for kind, _ in values):
            raise NotExpressible(keyword)
    if schema.keys() - _BOUND_NOTHING - _REFUSED_FOR.keys() - {*_FOLLOWED}:
        values -= {(kind, _ALL) for kind in _JSON}
    for keyword in filter(schema.__contains__, _FOLLOWED):
        inner = [schema[keyword]] if keyword == "const" else schema[keyword]
        if keyword == "$ref":
            inner = [resolved(root, inner)]
        if not isinstance(inner, list) or (keyword == "$ref" and inner == [None]):
            raise NotExpressible(keyword)
        if keyword in ("enum", "const"):
            scalars = {(type_of(value), value) for value in inner if type_of(value) not in _JSON}
            values &= scalars | {(type_of(value), _SOME) for value in inner}
        elif keyword in ("$ref", "allOf"):
            for part in inner:
                values = _fitting(root, part, values, steps, level + 1)
        else:
            choices = (_fitting(root, part, values, steps, level + 1) for part in inner)
            counts = Counter(value for choice in choices for value in choice)
            shared = {value for value in counts if counts[value] > 1 and keyword == "oneOf"}
            if any(kind not in _JSON and amount is not _SOME for kind, amount in shared):
                raise NotExpressible(keyword)
            # For JSON, llguidance enforces that only one schema fits.
            values = frozenset(counts) - {(kind, _ALL) for kind, _ in shared}
    return values


def _with_integer(types: Iterable[str]) -> frozenset[str]:
    """Add "integer" to types with "number"."""
    return frozenset({*types, "integer"} if "number" in types else types)
