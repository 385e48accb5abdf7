"""What a value may be that is written as bare text, as Qwen3-Coder's format has it.

`bare_values` decides what a text stands for. Whatever is allowed here is read as a value that fits
the schema: llguidance enforces the schema of what is JSON, and the rest is settled here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mlx_mtp.server.parsing.bare_values import (
    JSON_TYPES,
    MOST_PARTS,
    as_list,
    json_text,
    parts,
    resolved,
    type_of,
    value_types,
)
from mlx_mtp.server.parsing.json_reader import loads

_SPACE = r"[\s\x1c-\x1f]*"  # What Python takes for white space.
# A text with these in it would be read as the end of the value, or of the whole call.
_TAGS = (
    rf"<\/parameter>{_SPACE}(<parameter=|<\/function>)",
    rf"<\/function>{_SPACE}<\/tool_call>",
)
ANY_TEXT = " & ".join(["/(?s:.*)/", *(f"~/(?s:.*){tag}(?s:.*)/" for tag in _TAGS)])
"""A terminal of llguidance's Lark: any text that does not end its value."""
_JSON_BEGINS = {"integer": "[-0-9]", "number": "[-0-9]", "array": r"\[", "object": r"\{"}
_JSON = frozenset(_JSON_BEGINS)
# What is read as another type, or begins as its JSON: where both could go on, llguidance would
# take the text.
_READ_AS = {kind: f"{begins}(?s:.*)" for kind, begins in _JSON_BEGINS.items()} | {
    "null": f"(None|null)?{_SPACE}",
    "boolean": f"(?i:true|false){_SPACE}",
}

_NAME = re.compile(r"(?!\s)[^<>\r\n]+(?<!\s)")  # In a tag, others can't be read.
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
"""What a schema may say of an object that tags can't keep."""
_MOST_LEVELS = 16


class NotExpressible(Exception):  # noqa: N818 - without `strict` it is no error
    """What a keyword says can't be enforced; the keyword is the argument."""


def plain_parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's parameters with its own references followed.

    Raises:
        NotExpressible: it says more than which parameters there are, or their tags can't be read.
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
    """What a parameter may be: terminals of bare text, and the schema of what is JSON.

    Raises:
        NotExpressible: for a keyword that can't be enforced of bare text.
    """
    part, types = schema["properties"][key], value_types(schema, key)
    if types and "string" not in types:
        return [], _whole({"type": sorted(types), **part}, schema)
    _all_parts(schema, part, "allOf", "anyOf", "oneOf")
    allowed = _allowed(schema, part, {})
    read_as = types or frozenset(["string", "array", "object"])
    json_types = allowed.types & _with_integer(read_as) & _JSON
    terminals = []
    if "string" in allowed.fits:
        json_types -= allowed.fits
        shut = [f"~/{_SPACE}{_READ_AS[kind]}/" for kind in sorted(read_as - allowed.fits)]
        terminals.append(" & ".join([ANY_TEXT, *shut]))
    words = [value for value in (None, True, False) if _covers(allowed.fits, (value,))]
    words += [label[0] for label in allowed.fits if isinstance(label, tuple)]
    for value in sorted(words, key=str):
        text = value if isinstance(value, str) else json.dumps(value)
        begins_json = any(re.match(_JSON_BEGINS[kind], text.strip()) for kind in json_types)
        is_read_back = loads(json_text(text, types)) == value
        if is_read_back and not begins_json and not re.search("</(parameter|function)>", text):
            terminals.append(json.dumps(text))
    if not terminals and not json_types:
        raise NotExpressible("enum" if words else "type")
    if not json_types:
        return terminals, None
    return terminals, _whole({**part, "type": sorted(json_types)}, schema)


def _all_parts(root: Mapping[str, Any], part: object, *keywords: str) -> list[Mapping[str, Any]]:
    found = list(parts(root, part, *keywords))
    if len(found) == MOST_PARTS:
        raise NotExpressible(keywords[0])  # The parser would not look at all of them.
    return found


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _whole(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with all that it refers to."""
    whole = schema | _definitions(root)
    if re.search(r'"\$ref": "(?!#/\$defs/|#/definitions/)', json.dumps(whole)):
        raise NotExpressible("$ref")
    return whole


class _Allowed(NamedTuple):
    """What a schema allows.

    Args:
        types: of the values that may fit.
        fits: types of which every value fits; and each single string, null or boolean that fits
            beside them, as a tuple of one.
    """

    types: frozenset[str]
    fits: frozenset[Any]


def _allowed(
    root: Mapping[str, Any], schema: object, known: dict[str, _Allowed], level: int = 0
) -> _Allowed:
    """What a schema within `root` allows.

    Each reference is followed once, to be `known` then, so that this takes no longer than the
    schema is.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, Mapping):
        raise NotExpressible("properties")
    names = as_list(schema.get("type", [*JSON_TYPES]))
    if any(name not in JSON_TYPES for name in names):
        raise NotExpressible("type")
    types = _with_integer(names)
    for keyword, kinds in _REFUSED_FOR.items():
        if keyword in schema and types & kinds:
            raise NotExpressible(keyword)
    is_bounded = schema.keys() - _BOUND_NOTHING - _REFUSED_FOR.keys() - {*_FOLLOWED}
    allowed = _Allowed(types, types - _JSON if is_bounded else types)
    for keyword in _FOLLOWED:
        if keyword in schema:
            for choice in _choices(root, keyword, schema[keyword], known, level):
                labels = frozenset(
                    label
                    for label in allowed.fits | choice.fits
                    if _covers(allowed.fits, label) and _covers(choice.fits, label)
                )
                allowed = _Allowed(allowed.types & choice.types, _reduced(labels))
    return allowed


def _choices(
    root: Mapping[str, Any], keyword: str, value: Any, known: dict[str, _Allowed], level: int
) -> list[_Allowed]:
    """What a keyword allows: that which each of these does."""
    if keyword == "$ref":
        target = resolved(root, value)
        if target is None or level == _MOST_LEVELS:
            raise NotExpressible(keyword)
        if value not in known:
            known[value] = _allowed(root, target, known, level + 1)
        return [known[value]]
    values = [value] if keyword == "const" else value
    if not isinstance(values, list):
        raise NotExpressible(keyword)
    if keyword in ("enum", "const"):
        types = frozenset(map(type_of, values))
        return [_Allowed(types, frozenset((v,) for v in values if type_of(v) not in _JSON))]
    if not values or level == _MOST_LEVELS:
        raise NotExpressible(keyword)
    choices = [_allowed(root, each, known, level + 1) for each in values]
    if keyword == "allOf":
        return choices
    types, fits = (frozenset[Any]().union(*sets) for sets in zip(*choices, strict=True))
    fits = _reduced(fits)
    if keyword == "oneOf":
        # No two may allow the same; llguidance looks after what is JSON.
        if len(fits - _JSON) < sum(len(choice.fits - _JSON) for choice in choices):
            raise NotExpressible(keyword)
        fits -= {kind for kind in _JSON if sum(kind in choice.types for choice in choices) > 1}
    return [_Allowed(types, fits)]


def _covers(fits: Iterable[Any], label: Any) -> bool:
    return label in fits or (isinstance(label, tuple) and type_of(label[0]) in fits)


def _reduced(labels: frozenset[Any]) -> frozenset[Any]:
    """Without single values all others of the type of which fit too."""
    return frozenset(x for x in labels if isinstance(x, str) or type_of(x[0]) not in labels)


def _with_integer(types: Iterable[str]) -> frozenset[str]:
    """Whole numbers are numbers too."""
    return frozenset({*types, "integer"} if "number" in types else types)
