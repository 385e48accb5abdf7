"""Grammars of tool calls in llguidance's dialect of Lark: for `tool_choice` and strict tools.

There an added token such as `<tool_call>` is a symbol that no string and no text pattern matches.
"""

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from mlx_mtp.errors import GrammarError, UnsupportedParameterError
from mlx_mtp.sampling.grammar import JSON_WHITESPACE, MAX_GRAMMAR_CHARACTERS
from mlx_mtp.server.conversation import Tool
from mlx_mtp.server.parsing.qwen import CALL, CALL_END
from mlx_mtp.server.parsing.xml_values import (
    ANY_TEXT,
    BEYOND_TAGS,
    NotExpressible,
    plain_parameters,
    value_forms,
)

_VALUE_END = r"/\n<\/parameter>\n/"


class Rules(dict[str, str]):
    """Bodies by name. Each parameter that is JSON has a copy of its tool's definitions."""

    size = 0

    def __setitem__(self, name: str, body: str) -> None:
        super().__setitem__(name, body)
        self.size += len(body)
        if self.size > MAX_GRAMMAR_CHARACTERS:
            raise GrammarError(
                f"tools can't be enforced: their grammar has more than {MAX_GRAMMAR_CHARACTERS} "
                "characters.",
                param="tools",
            )


def call_rules(tools: Sequence[Tool], added_tokens: Container[str], *, xml: bool) -> Rules:
    """The rule `call`, and what it needs: one call of any of the tools, as tags or as JSON.

    What can't be enforced is an error for strict tools, and left open for others.
    """
    rules = Rules()
    if xml:
        rules["ANY_TEXT"] = ANY_TEXT
        rules["any_value[lazy]"] = f"ANY_TEXT {_VALUE_END}"
    opening, closing = (tag if tag in added_tokens else json.dumps(tag) for tag in (CALL, CALL_END))
    for number, tool in enumerate(tools):
        body = (_xml_call if xml else _json_call)(f"call_{number}", tool, rules)
        rules[f"call_{number}"] = f"{opening} {body} {closing}"
    rules["call"] = " | ".join(f"call_{number}" for number in range(len(tools)))
    return rules


def json_rule(schema: Mapping[str, Any], *, strict: bool) -> str:
    """The body of a rule for a JSON value; if `strict`, unknown keywords of it are an error."""
    options = {"whitespace_pattern": JSON_WHITESPACE, "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _json_call(rule: str, tool: Tool, rules: Rules) -> str:
    rules[f"{rule}_arguments"] = json_rule(_parameters(tool), strict=tool.strict)
    start = json.dumps(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    return rf'{start} {rule}_arguments "}}\n"'


def _xml_call(rule: str, tool: Tool, rules: Rules) -> str:
    schema = _parameters(tool)
    try:
        schema = plain_parameters(schema)
    except NotExpressible as error:
        _check_lax(tool, error, "its schema")
    start = json.dumps(f"\n<function={tool.name}>\n")
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        properties = {}
    body = ""
    for number, key in enumerate(properties):
        value = _xml_value(f"{rule}_{number}", tool, schema, key, rules)
        parameter = f"{json.dumps(f'<parameter={key}>' + chr(10))} {value}"
        is_required = isinstance(required, list) and key in required
        body += f" {parameter}" if is_required else f" ({parameter})?"
    if not properties and schema.get("additionalProperties") is not False:
        body = r' ("<parameter=" /[^<>\n]+/ ">\n" any_value)*'
    return rf'{start}{body} "</function>\n"'


def _xml_value(rule: str, tool: Tool, schema: Mapping[str, Any], key: str, rules: Rules) -> str:
    """A parameter's value and the tag that ends it."""
    try:
        terminals, json_schema = value_forms(schema, key)
    except NotExpressible as error:
        _check_lax(tool, error, f"its parameter {json.dumps(key)}")
        terminals = [ANY_TEXT]
    if ANY_TEXT in terminals:
        return "any_value"
    ways = []
    if terminals:
        rules[rule.upper()] = " | ".join(terminals)
        rules[f"{rule}_text[lazy]"] = f"{rule.upper()} {_VALUE_END}"
        ways.append(f"{rule}_text")
    if json_schema is not None:
        rules[f"{rule}_json"] = json_rule(json_schema, strict=tool.strict)
        ways.append(f"{rule}_json {_VALUE_END}")
    return f"({' | '.join(ways)})"


def _parameters(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's parameters, where one that names none, as many clients write, allows
    none (OpenAI: "Omitting `parameters` defines a function with an empty parameter list")."""
    schema = tool.parameters or {}
    says_more = (
        schema.get("type", "object") != "object"
        or schema.get("additionalProperties", False) is not False
        or any(schema.get(key) for key in ("properties", "required", "$ref", "allOf", *BEYOND_TAGS))
    )
    return schema if says_more else {"type": "object", "additionalProperties": False}


def _check_lax(tool: Tool, error: NotExpressible, where: str) -> None:
    if tool.strict:
        raise UnsupportedParameterError(
            f"strict: true can't be kept for the tool {json.dumps(tool.name)} with this model's "
            f"format of calls: {where} has {json.dumps(str(error))} in a form that no grammar "
            "enforces here. Leave out strict, or that keyword.",
            param="tools",
        ) from None
