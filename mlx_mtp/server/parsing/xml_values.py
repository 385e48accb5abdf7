"""The grammar of a value that is written as bare text, as Qwen3-Coder's format has it.

What a text stands for is decided by `json_types.json_text`; what is allowed here is read by it as a
value that fits the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_mtp.server.parsing import strict_json
from mlx_mtp.server.parsing.json_types import json_text, value_types
from mlx_mtp.server.parsing.patterns import FORMATS, pattern_regex
from mlx_mtp.server.parsing.schema_forms import NotExpressible, fits_type, form_types, forms

END = r"\n<\/parameter>\n"
"""What ends a value, as a regular expression."""
_SPACE = r"[\s\x1c-\x1f]*"  # What Python takes for white space.
# A text with these in it would be read as the end of the value, or of the whole call.
_TAGS = (
    rf"<\/parameter>{_SPACE}(<parameter=|<\/function>)",
    rf"<\/function>{_SPACE}<\/tool_call>",
)
_ANY_TEXT = " & ".join(["/(?s:.*)/", *(f"~/(?s:.*){tag}(?s:.*)/" for tag in _TAGS)])
_SCALARS = {
    "null": "null",
    "boolean": "true|false",
    "integer": r"-?(0|[1-9][0-9]{0,17})",
    "number": r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?",
}
# What bare text may be read as, where a string isn't the only type.
_READ_AS = {
    "null": "(None|null)?",
    "boolean": "(?i:true|false)",
    "integer": r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?",
    "number": r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}
_FIRST = {"integer": "[-0-9]", "number": "[-0-9]", "array": r"\[", "object": r"\{"}
_OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
_OF_OTHERS = {
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
        | {"minProperties", "maxProperties"}
    ),
}


@dataclass(slots=True)
class TextValue:
    """What a value may be that may be a string.

    Args:
        terminals: of bare text, in llguidance's Lark.
        schemas: of JSON.
    """

    terminals: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)


def any_text() -> str:
    """A terminal: any text that does not end its value."""
    return _ANY_TEXT


def text_value(schema: Mapping[str, Any], key: str, *, strict: bool) -> TextValue | None:
    """What a parameter may be that may be a string; None: any text.

    Args:
        schema: of the tool's parameters.
        key: the parameter's name.
        strict: what can't be expressed is an error; otherwise it is left open.

    Raises:
        NotExpressible: for a keyword that no grammar of bare text can enforce.
    """
    part = schema["properties"][key]
    try:
        found = forms(schema, part)
        reader = _Reader(value_types(schema, key), found, strict=strict)
        return reader.value()
    except NotExpressible:
        if strict:
            raise
        return None


class _Reader:
    """Turns plain schemas into terminals, knowing what a text would be read as."""

    def __init__(self, types: frozenset[str], found: list[dict[str, Any]], *, strict: bool) -> None:
        self._types = types
        self._forms = found
        self._strict = strict
        # Types of which any value will do, whatever bare text is read as.
        self._open = {kind for form in found for kind in _open_types(form)}
        free = not any(
            form.keys() & (_OF_STRINGS | {"enum"}) for form in found if "string" in form_types(form)
        )
        # Types whose values are JSON by a schema. One character tells them from bare text: where
        # both could go on, llguidance would take the text.
        self._routed = {
            kind
            for form in found
            if "enum" not in form and "type" in form
            for kind in form_types(form) & _FIRST.keys()
            if kind not in self._open or (kind in ("array", "object") and not free)
        }

    def value(self) -> TextValue | None:
        value = TextValue()
        for form in self._forms:
            if not form:
                return None  # Anything goes, and whatever it is read as fits.
            self._check(form)
            if "enum" in form:
                value.terminals.extend(self._words(form))
                continue
            types = form_types(form)
            if "string" in types:
                value.terminals.append(self._text(form))
            if "type" not in form:
                continue  # Bare text that is read as something else fits too.
            scalars = (types & self._open & _SCALARS.keys()) - self._routed
            value.terminals.extend(f"/{_SCALARS[kind]}/" for kind in sorted(scalars))
            routed = sorted(types & self._routed)
            if routed:
                value.schemas.append({**form, "type": routed})
        if not value.terminals and not value.schemas:
            raise NotExpressible("enum" if any("enum" in form for form in self._forms) else "type")
        return None if _ANY_TEXT in value.terminals else value

    def _check(self, form: Mapping[str, Any]) -> None:
        """Raise for keywords that would be left out."""
        if not self._strict:
            return
        types = form_types(form)
        known = {"type", "enum"} | _OF_STRINGS
        for kind, keywords in _OF_OTHERS.items():
            applies = bool(types & ({"integer", "number"} if kind == "number" else {kind}))
            if not applies or ("type" in form and "enum" not in form):
                known |= keywords
        standing = [key for key in form if key not in known and key in _ALL_KEYWORDS]
        if standing:
            raise NotExpressible(standing[0])

    def _words(self, form: Mapping[str, Any]) -> Iterable[str]:
        types = form_types({key: form[key] for key in form if key == "type"})
        strings: list[str] = []
        others: list[str] = []
        for value in form["enum"]:
            if not fits_type(value, types):
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if self._is_read_as(text, value):
                (strings if isinstance(value, str) else others).append(json.dumps(text))
        if strings:
            constraints = [f"({' | '.join(strings)})", *self._constraints(form)]
            yield " & ".join(constraints)
        yield from others

    def _is_read_as(self, text: str, value: object) -> bool:
        """The text means this value, and doesn't end early."""
        if any(tag in text for tag in ("</parameter>", "</function>")):
            return False
        if self._types == {"string"}:
            return text == value
        if any(re.match(_FIRST[kind], text.strip()) for kind in self._routed):
            return False
        read = strict_json.loads(json_text(text, self._types))
        return bool(read == value) and type(read) is type(value)

    def _text(self, form: Mapping[str, Any]) -> str:
        terms = [*self._constraints(form), _ANY_TEXT]
        if "type" in form and self._types != {"string"}:
            shut = self._types - {"string"} - self._open
            if "number" in self._open:
                shut -= {"integer"}
            terms += [f"~/{_SPACE}{_FIRST[kind]}(?s:.*)/" for kind in sorted(self._routed)]
            terms += [
                f"~/{_SPACE}{_READ_AS[kind]}{_SPACE}/" for kind in sorted(shut) if kind in _READ_AS
            ]
        return " & ".join(terms)

    def _constraints(self, form: Mapping[str, Any]) -> Iterable[str]:
        """Terminals all of which a string has to match."""
        least, most = form.get("minLength", 0), form.get("maxLength", "")
        if least or most != "":
            yield f"/(?s:.{{{least},{most}}})/"
        if "pattern" in form:
            regex = pattern_regex(form["pattern"])
            if regex is not None:
                yield f"/{regex}/"
            elif self._strict:
                raise NotExpressible("pattern")
        if "format" in form:
            if form["format"] in FORMATS:
                yield f"/{FORMATS[form['format']]}/"
            elif self._strict:
                raise NotExpressible("format")


_ALL_KEYWORDS = frozenset(
    {"not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies"}
    | {"unevaluatedProperties", "unevaluatedItems", "additionalItems", "contentSchema"}
    | {"minContains", "maxContains", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor"}
).union(_OF_STRINGS, *_OF_OTHERS.values())


def _open_types(form: Mapping[str, Any]) -> frozenset[str]:
    """The types, other than strings, of which a plain schema allows every value."""
    if "enum" in form:
        return frozenset({"null"} if None in form["enum"] and "null" in form_types(form) else ())
    found = set()
    for kind in form_types(form) - {"string"}:
        of = "number" if kind == "integer" else kind
        if not any(key in _OF_OTHERS.get(of, ()) for key in form) and not (
            form.keys() & (_ALL_KEYWORDS - _OF_STRINGS - frozenset().union(*_OF_OTHERS.values()))
        ):
            found.add(kind)
    return frozenset(found)
