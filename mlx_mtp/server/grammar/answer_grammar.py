"""Builds an answer's grammar from its form, tools and thinking budget, in llguidance's Lark.

There an added token such as `<tool_call>` is a symbol, which no string and no pattern matches.
"""

import json
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from mlx_mtp.errors import GrammarError, InvalidRequestError, UnsupportedParameterError
from mlx_mtp.sampling.grammar import MAX_GRAMMAR_CHARACTERS
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.generation.inputs import Conversation, Tool
from mlx_mtp.server.grammar import xml_values
from mlx_mtp.server.grammar.json_schemas import styled
from mlx_mtp.text.parsing.bare_values import as_list
from mlx_mtp.text.parsing.formats import HERMES, NONE, QWEN3_CODER, OutputFormat
from mlx_mtp.text.parsing.tags import CALL, CALL_END, CLOSE, OPEN

_ENFORCED = (HERMES, QWEN3_CODER)
_VALUE_END = r"/\n<\/parameter>\n/"


def check_tools(conversation: Conversation, output_format: OutputFormat) -> None:
    """Raises InvalidRequestError or UnsupportedParameterError if the tools can't be used."""
    choice, offered = conversation.tool_choice, conversation.offered_tools
    missing = sorted((choice.names or frozenset()) - {tool.name for tool in conversation.tools})
    if missing:
        raise InvalidRequestError(
            f"{choice.field} names {missing[0]!r}, which is not one of the tools.",
            param=choice.field,
        )
    if choice.mode == "required" and not conversation.tools:
        raise InvalidRequestError(
            f"{choice.field} asks for a tool call, but there are no tools.", param=choice.field
        )
    if offered and output_format.tools == NONE:
        raise UnsupportedParameterError(
            "This server was started with --tool-call-parser none.", param="tools"
        )
    strict = any(tool.strict for tool in offered)
    if output_format.tools not in _ENFORCED and (choice.mode == "required" or strict):
        raise UnsupportedParameterError(
            f"With the format {output_format.tools} tool calls can't be enforced.",
            param="tools" if strict else choice.field,
        )


def max_calls(conversation: Conversation) -> int | None:
    """Returns the maximum number of tool calls in one answer; None: no maximum."""
    choice = conversation.tool_choice
    named = choice.mode == "required" and len(choice.names or ()) == 1
    return 1 if named or not conversation.parallel_tool_calls else None


def answer_grammar(
    conversation: Conversation,
    output_format: OutputFormat,
    added_tokens: Container[str],
    *,
    thinking: bool,
    as_standard: bool = False,
) -> GrammarSpec | None:
    """Returns the answer's grammar (None: any text); raises RequestError if it can't be enforced.

    If `thinking`, the answer begins within a think block, which may be any text of up to
    `thinking_budget` tokens. If `as_standard`, objects may have properties beyond their schema's.
    """
    grammar, tools = conversation.response, conversation.offered_tools
    required = conversation.tool_choice.mode == "required"
    if tools and (required or grammar or any(tool.strict for tool in tools)):
        if output_format.tools not in _ENFORCED:
            raise UnsupportedParameterError(
                f"With the format {output_format.tools} {conversation.response_field} does not go "
                "with tools.",
                param=conversation.response_field,
            )
        xml = output_format.tools == QWEN3_CODER
        rules = _Rules(as_standard)
        text = _lark(conversation, added_tokens, rules, xml=xml, thinking=thinking)
        grammar = GrammarSpec("lark", text)
    budget = conversation.thinking_budget
    if not thinking or (grammar is None and budget is None):
        return grammar
    return replace(grammar or GrammarSpec("free"), free_until=CLOSE, free_tokens=budget)


def _lark(
    conversation: Conversation,
    added_tokens: Container[str],
    rules: "_Rules",
    *,
    xml: bool,
    thinking: bool,
) -> str:
    """Returns the grammar of an answer that may have tool calls, written in tags if `xml`."""
    calls = []
    if xml:
        rules["ANY_TEXT"] = xml_values.ANY_TEXT
        rules["any_value[lazy]"] = f"ANY_TEXT {_VALUE_END}"
    opening, closing = (tag if tag in added_tokens else json.dumps(tag) for tag in (CALL, CALL_END))
    for number, tool in enumerate(conversation.offered_tools):
        body = (_xml_call if xml else _json_call)(f"call_{number}", tool, rules)
        rules[f"call_{number}"] = f"{opening} {body} {closing}"
        calls.append(f"call_{number}")
    rules["call"] = " | ".join(calls)
    required, response = conversation.tool_choice.mode == "required", conversation.response
    if required or response is not None:
        rules["calls"] = "call" if max_calls(conversation) == 1 else r'call ("\n" call)*'
        rules["answer"] = "calls" if required or response is None else _rule(response, rules)
        start = r"/\n{0,2}/ (calls | answer)" if thinking else "calls | answer"
    else:
        # Any text, with any number of calls in it.
        if CALL not in added_tokens:
            raise UnsupportedParameterError(
                "strict: true needs a model with a token for tool calls; use tool_choice "
                '"required" with this one.',
                param="tools",
            )
        rules["TEXT"] = "/(?s:.+)/"
        tags = [tag for tag in (OPEN, CLOSE) if tag in added_tokens]
        start = f"({' | '.join(['TEXT', 'call', *tags])})*"
    lines = (f"{name}: {body}\n" for name, body in {"start": start, **rules}.items())
    return "%llguidance {}\n" + "".join(lines)


def _rule(response: GrammarSpec, rules: "_Rules") -> str:
    """Returns the form of an answer as the body of a rule."""
    if response.kind in ("json_schema", "json_object"):
        return rules.json(json.loads(response.value or '{"type": "object"}'), strict=True)
    if response.kind == "choice":
        return " | ".join(json.dumps(choice) for choice in json.loads(response.value))
    kind = "grammar" if response.kind == "lark" else response.kind
    message = f"A {kind} can't be combined with tools here; a JSON schema or a choice can."
    raise UnsupportedParameterError(message, param="tools")


class _Rules(dict[str, str]):
    """Rule bodies by name, bounded in size: each JSON parameter copies its tool's definitions."""

    size = 0

    def __init__(self, as_standard: bool) -> None:
        super().__init__()
        self._as_standard = as_standard

    def json(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        """Returns the rule body for a JSON value; if `strict`, unknown keywords are an error."""
        made = styled(schema, as_standard=self._as_standard, lenient=not strict)
        return f"%json {json.dumps(made)}"

    def __setitem__(self, name: str, body: str) -> None:
        super().__setitem__(name, body)
        self.size += len(body)
        if self.size > MAX_GRAMMAR_CHARACTERS:
            raise GrammarError(
                f"tools can't be enforced: their grammar has more than {MAX_GRAMMAR_CHARACTERS} "
                "characters.",
                param="tools",
            )


def _json_call(rule: str, tool: Tool, rules: _Rules) -> str:
    rules[f"{rule}_arguments"] = rules.json(_parameters(tool), strict=tool.strict)
    start = json.dumps(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    return rf'{start} {rule}_arguments "}}\n"'


def _xml_call(rule: str, tool: Tool, rules: _Rules) -> str:
    schema = schema_of_tags(tool)
    start = json.dumps(f"\n<function={tool.name}>\n")
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, Mapping) else {}
    body = ""
    for number, key in enumerate(properties):
        value = _xml_value(f"{rule}_{number}", tool, schema, key, rules)
        parameter = f"{json.dumps(f'<parameter={key}>' + chr(10))} {value}"
        body += f" {parameter}" if key in as_list(required) else f" ({parameter})?"
    if not properties and schema.get("additionalProperties") is not False:
        body = r' ("<parameter=" /[^<>\n]+/ ">\n" any_value)*'
    return rf'{start}{body} "</function>\n"'


def schema_of_tags(tool: Tool) -> Mapping[str, Any]:
    """Returns the schema of a tool's parameters for a call in tags, with references followed.

    If tags can't express it: the schema as it is, or UnsupportedParameterError for a strict tool.
    """
    schema = _parameters(tool)
    try:
        return xml_values.plain_parameters(schema)
    except xml_values.NotExpressible as error:
        _check_lax(tool, error, "its schema")
    return schema


def _xml_value(rule: str, tool: Tool, schema: Mapping[str, Any], key: str, rules: _Rules) -> str:
    """Returns the rule body for a parameter's value and the tag that ends it."""
    try:
        terminals, json_schema = xml_values.value_forms(schema, key)
    except xml_values.NotExpressible as error:
        _check_lax(tool, error, f"its parameter {json.dumps(key)}")
        terminals = [xml_values.ANY_TEXT]
    if xml_values.ANY_TEXT in terminals:
        return "any_value"
    ways = []
    if terminals:
        rules[rule.upper()] = " | ".join(terminals)
        rules[f"{rule}_text[lazy]"] = f"{rule.upper()} {_VALUE_END}"
        ways.append(f"{rule}_text")
    if json_schema is not None:
        rules[f"{rule}_json"] = rules.json(json_schema, strict=tool.strict)
        ways.append(f"{rule}_json {_VALUE_END}")
    return f"({' | '.join(ways)})"


def _parameters(tool: Tool) -> Mapping[str, Any]:
    """Returns the schema of a tool's parameters; one without parameters allows none.

    OpenAI: "Omitting `parameters` defines a function with an empty parameter list".
    """
    schema = tool.parameters or {}
    says_more = (
        schema.get("type", "object") != "object"
        or schema.get("additionalProperties", False) is not False
        or any(
            schema.get(key)
            for key in ("properties", "required", "$ref", "allOf", *xml_values.BEYOND_TAGS)
        )
    )
    return schema if says_more else {"type": "object", "additionalProperties": False}


def _check_lax(tool: Tool, error: xml_values.NotExpressible, where: str) -> None:
    if tool.strict:
        raise UnsupportedParameterError(
            f"strict: true can't be kept for the tool {json.dumps(tool.name)} with this model's "
            f"format of calls: {where} has {json.dumps(str(error))} in a form that no grammar "
            "enforces here. Leave out strict, or that keyword.",
            param="tools",
        ) from None
