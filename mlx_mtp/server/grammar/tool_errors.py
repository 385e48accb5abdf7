"""Finds the tool, parameter and keyword that make the grammar of an answer's tools fail."""

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from mlx_mtp.bounded_json import shortened
from mlx_mtp.errors import GrammarError
from mlx_mtp.server.generation.inputs import Tool
from mlx_mtp.server.grammar.answer_grammar import schema_of_tags
from mlx_mtp.server.grammar.json_schemas import OPTIONS

# The rules that `answer_grammar` writes for a tool's arguments, or for one of its parameters.
_RULE = re.compile(r"call_(\d+)_(?:arguments|(\d+)_json): %json (.*)")
_ErrorOf = Callable[[Mapping[str, Any]], str | None]


def named_error(error: str, lark: str, tools: Sequence[Tool], error_of: _ErrorOf) -> GrammarError:
    """Returns the error of a tools' grammar, with place and `param` if one tool's schema fails.

    `error_of` compiles a single JSON schema and returns its error or None. When it raises
    TimeoutError, the search ends with the place found so far.
    """
    lines, position = lark.splitlines(), re.match(r"at (\d+)\(\d+\): ", error)
    if position is not None:
        lines, error = lines[int(position[1]) - 1 :][:1], error[position.end() :]
    named = None
    with contextlib.suppress(TimeoutError):
        for rule in filter(None, map(_RULE.fullmatch, lines)):
            schema, tool = json.loads(rule[3]), tools[int(rule[1])]
            if (fault := error_of(schema)) is None:
                continue
            key = rule[2] and [*schema_of_tags(tool)["properties"]][int(rule[2])]
            for named in _narrowed(tool, key, schema, fault, error_of):  # noqa: B007 - the last
                pass
            break
    return GrammarError(error) if named is None else GrammarError(named, param="tools")


def _narrowed(
    tool: Tool, key: str | None, schema: dict[str, Any], fault: str, error_of: _ErrorOf
) -> Iterator[str]:
    """Yields a schema's error at ever more precise places; `key` is its parameter (None: all)."""
    place = f"the tool {json.dumps(tool.name)}"
    yield f"{place}: {fault}"
    part, properties = schema, schema.get("properties")
    if key is None and isinstance(properties, dict):

        def with_any(names: Collection[str]) -> dict[str, Any]:
            return schema | {"properties": properties | {name: {} for name in names}}

        key, fault = _culprit([*properties], with_any, fault, error_of)
        if key is not None:
            others = with_any(properties)
            part = properties[key]
    if key is not None:
        place = f"the parameter {_quoted(key)} of {place}"
        yield f"{place}: {fault}"

    def without(names: Collection[str]) -> dict[str, Any]:
        rest = {name: value for name, value in part.items() if name not in names}
        if part is schema:
            return rest
        return others | {"properties": others["properties"] | {key: rest}}

    if isinstance(part, dict):
        # The type is left out last, as other keywords may have no effect without it.
        keywords = sorted(part.keys() - {OPTIONS}, key=lambda name: (name == "type", name))
        keyword, fault = _culprit(keywords, without, fault, error_of)
        if keyword is not None:
            yield f"{_quoted(keyword)} of {place}: {fault}"


def _culprit(
    names: Sequence[str],
    schema_without: Callable[[Collection[str]], Mapping[str, Any]],
    fault: str,
    error_of: _ErrorOf,
) -> tuple[str | None, str]:
    """Leave out names one by one; returns the one without which nothing fails, and its error."""
    for number, name in enumerate(names, 1):
        left = error_of(schema_without(names[:number]))
        if left is None:
            return name, fault
        fault = left
    return None, fault


def _quoted(name: str) -> str:
    return json.dumps(shortened(name), ensure_ascii=False)
