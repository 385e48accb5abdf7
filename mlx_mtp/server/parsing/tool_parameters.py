"""The schema of a tool's parameters as a whole: what it leaves open, and what is too much of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_mtp.server.parsing.schema_forms import (
    ANNOTATIONS,
    NotExpressible,
    form_types,
    forms,
)

_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_CONTENT = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
    | {"enum", "const", "patternProperties", "propertyNames", "minProperties"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"}
)
_STANDARD = _CONTENT | {"maxProperties"}


def parameters_schema(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a tool's parameters, where one that names none allows none.

    OpenAI: "Omitting `parameters` defines a function with an empty parameter list." Many clients
    write `{"type": "object", "properties": {}}` for it.
    """
    if not schema:
        return _NO_PARAMETERS
    if schema.get("type", "object") != "object" or schema.keys() & _CONTENT:
        return schema
    content = (schema.get("properties"), schema.get("required"))
    return schema if any(content) or not is_closed(schema, default=True) else _NO_PARAMETERS


def is_closed(schema: Mapping[str, Any], *, default: bool = False) -> bool:
    """No other properties than those that are named.

    Args:
        schema: of an object.
        default: the answer where it does not say.
    """
    return schema.get("additionalProperties", not default) is False


def plain_parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with its own references followed; all that it says is of its named properties.

    Raises:
        NotExpressible: it says more, which a format of tags can't enforce.
    """
    found = forms(schema, schema)
    if len(found) != 1:
        raise NotExpressible(next(iter(schema.keys() & {"anyOf", "oneOf", "allOf"}), "type"))
    (plain,) = found
    beyond = sorted(plain.keys() & _STANDARD)
    if beyond:
        raise NotExpressible(beyond[0])
    if "object" not in form_types(plain):
        raise NotExpressible("type")
    _check_names(plain)
    kept = {key: schema[key] for key in ANNOTATIONS & schema.keys()}
    return {**kept, **plain}


def _check_names(schema: Mapping[str, Any]) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise NotExpressible("properties")
    if any(key != key.strip() or not key or set(key) & set("<>\r\n") for key in properties):
        raise NotExpressible("properties")  # The tag of such a parameter can't be read.
    if not isinstance(required, list) or not properties.keys() >= set(required):
        raise NotExpressible("required")
    others = schema.get("additionalProperties")
    if not properties and others not in (None, False, True, {}):
        raise NotExpressible("additionalProperties")


def has_foreign_reference(schema: object) -> bool:
    """A reference within the schema leads elsewhere than to definitions."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            reference = part.get("$ref")
            if isinstance(reference, str) and not reference.startswith(
                ("#/$defs/", "#/definitions/")
            ):
                return True
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
    return False
