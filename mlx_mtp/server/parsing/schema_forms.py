"""A schema as a list of plain ones: references are followed, and what is combined is merged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlx_mtp.server.parsing.json_types import JSON_TYPES, resolved, type_of

ANNOTATIONS = frozenset(
    {"$comment", "$defs", "$id", "$schema", "definitions", "title", "description", "deprecated"}
    | {"default", "example", "examples", "readOnly", "writeOnly", "discriminator"}
    | {"contentEncoding", "contentMediaType"}
)
"""Keywords that say nothing about what is valid."""
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_WELL_FORMED: Mapping[str, Callable[[Any], bool]] = {
    "type": lambda value: JSON_TYPES.issuperset(_listed(value)),
    "enum": lambda value: isinstance(value, list),
    "minLength": lambda value: type(value) is int and value >= 0,
    "maxLength": lambda value: type(value) is int and value >= 0,
    "pattern": lambda value: isinstance(value, str),
    "format": lambda value: isinstance(value, str),
    "required": lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value),
}
_MOST_FORMS = 64
_MOST_LEVELS = 16


class NotExpressible(Exception):  # noqa: N818 - not every caller takes it for an error
    """What a keyword says can't be told by a list of plain schemas, or by a grammar.

    Args:
        keyword: which.
    """

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


def forms(root: Mapping[str, Any], part: object, level: int = 0) -> list[dict[str, Any]]:
    """Schemas without references and combinations: what fits `part` fits one of them.

    A `const` is an `enum` in them, and annotations are left out.

    Args:
        root: what references point into.
        part: a schema within it.
        level: of references and combinations around it.

    Raises:
        NotExpressible: for a reference that leads nowhere or in a circle, keywords that can't be
            merged, alternatives of a `oneOf` that may both hold, or too many of them.
    """
    if part is False:
        return []
    schema: Any = {} if part is True else part
    if not isinstance(schema, Mapping):
        raise NotExpressible("properties")
    found = [_plain(schema)]
    for keyword in _COMBINING:
        if keyword not in schema:
            continue
        if level == _MOST_LEVELS:
            raise NotExpressible(keyword)
        for choice in _choices(root, keyword, schema[keyword], level + 1):
            found = [both for a in found for b in choice if (both := _merged(a, b)) is not None]
            if len(found) > _MOST_FORMS:
                raise NotExpressible(keyword)
    return found


def form_types(form: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a plain schema allows; all of them if it says nothing of it."""
    types: Iterable[str] = JSON_TYPES
    if "type" in form:
        types = _listed(form["type"])
    if "enum" in form:
        given = set(types)
        types = [type_of(value) for value in form["enum"] if fits_type(value, given)]
    return frozenset(types)


def fits_type(value: object, types: Iterable[str]) -> bool:
    """The value is of one of some JSON types."""
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    plain = {
        key: value
        for key, value in schema.items()
        if key not in ANNOTATIONS and key not in _COMBINING and key != "const"
    }
    for keyword, fine in _WELL_FORMED.items():
        if keyword in plain and not fine(plain[keyword]):
            raise NotExpressible(keyword)
    if "const" in schema:
        given = plain.get("enum", [schema["const"]])
        plain["enum"] = [value for value in given if _same(value, schema["const"])]
    return plain


def _choices(
    root: Mapping[str, Any], keyword: str, value: object, level: int
) -> list[list[dict[str, Any]]]:
    """Lists of forms; a value fits one of each list."""
    if keyword == "$ref":
        target = root if value == "#" else resolved(root, value)
        if target is None:
            raise NotExpressible(keyword)
        return [forms(root, target, level)]
    if not isinstance(value, list):
        raise NotExpressible(keyword)
    parts = [forms(root, inner, level) for inner in value]
    if keyword == "allOf":
        return parts
    if keyword == "oneOf" and not _disjoint(parts):
        raise NotExpressible(keyword)
    return [[form for part in parts for form in part]]


def _disjoint(parts: list[list[dict[str, Any]]]) -> bool:
    seen: list[dict[str, Any]] = []
    for part in parts:
        if any(_overlap(form, other) for form in part for other in seen):
            return False
        seen.extend(part)
    return True


def _overlap(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if "enum" in a and "enum" in b:
        return any(_same(x, y) for x in a["enum"] for y in b["enum"])
    return bool(_common_types(list(form_types(a)), list(form_types(b))))


def _merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schema for what fits both; None: nothing does."""
    merged = {**a, **b}
    for keyword in a.keys() & b.keys():
        x, y = a[keyword], b[keyword]
        if keyword == "type":
            merged[keyword] = _common_types(_listed(x), _listed(y))
        elif keyword == "enum":
            merged[keyword] = [value for value in x if any(_same(value, other) for other in y)]
        elif keyword in ("minLength", "maxLength"):
            merged[keyword] = max(x, y) if keyword == "minLength" else min(x, y)
        elif keyword == "required":
            merged[keyword] = [*x, *(name for name in y if name not in x)]
        elif x != y:
            raise NotExpressible(keyword)
        if merged[keyword] == [] and keyword in ("type", "enum"):
            return None
    return merged if form_types(merged) else None


def _common_types(x: list[str], y: list[str]) -> list[str]:
    common = [name for name in x if name in y]
    if "integer" not in common and "integer" in {*x, *y} and _numeric(x) and _numeric(y):
        common.append("integer")
    return common


def _numeric(types: list[str]) -> bool:
    return "integer" in types or "number" in types


def _listed(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    return [str(name) for name in names]


def _same(a: object, b: object) -> bool:
    # Python's True is 1, JSON's is not.
    return a == b and isinstance(a, bool) == isinstance(b, bool)
