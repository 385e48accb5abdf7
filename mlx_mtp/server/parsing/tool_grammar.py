"""Grammars that make a model call tools: for `tool_choice`, and for tools that are strict.

They are written in llguidance's dialect of Lark. There an added token such as `<tool_call>` is a
symbol of its own, which no string and no text pattern matches.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_mtp.errors import UnsupportedParameterError
from mlx_mtp.sampling.grammar import JSON_WHITESPACE
from mlx_mtp.server.parsing.formats import QWEN3_CODER
from mlx_mtp.server.parsing.json_types import value_types
from mlx_mtp.server.parsing.reading import CALL_END
from mlx_mtp.server.parsing.schema_forms import NotExpressible
from mlx_mtp.server.parsing.think import CLOSE, OPEN
from mlx_mtp.server.parsing.tool_parameters import (
    has_foreign_reference,
    is_closed,
    parameters_schema,
    plain_parameters,
)
from mlx_mtp.server.parsing.tool_parser import CALL
from mlx_mtp.server.parsing.xml_values import END, any_text, text_value

_DEFINITIONS = ("$defs", "definitions")
_LEAD = r"/\n{0,2}/"


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool, as far as a grammar is concerned.

    Args:
        name: of the function.
        schema: JSON schema of its parameters; None: it has none.
        strict: what can't be expressed in a grammar is an error, instead of being left open.
    """

    name: str
    schema: Mapping[str, Any] | None
    strict: bool = False


class ToolGrammar:
    """Builds the grammar of an answer that has calls.

    Args:
        tool_format: "hermes" or "qwen3_coder".
        tools: those that may be called.
        added_tokens: the tokenizer's added tokens, by their text.
    """

    def __init__(
        self, tool_format: str, tools: Sequence[CallableTool], added_tokens: Container[str]
    ) -> None:
        self._xml = tool_format == QWEN3_CODER
        self._added = added_tokens
        self._rules: dict[str, str] = {}
        names = [self._tool(number, tool) for number, tool in enumerate(tools)]
        self._rule("call", " | ".join(names))

    def calls_only(self, *, parallel: bool, after_think: bool) -> str:
        """Nothing but calls, one at least.

        Args:
            parallel: there may be several.
            after_think: the answer follows a think block, with an empty line between them.
        """
        return self._grammar(f"{_LEAD if after_think else ''} {self._calls(parallel=parallel)}")

    def calls_or_text(self) -> str:
        """Text and calls in any order, each call as its tool's schema has it.

        Raises:
            UnsupportedParameterError: the tokenizer has no token that calls begin with, so that
                text and call can't be told apart.
        """
        if CALL not in self._added:
            raise UnsupportedParameterError(
                "strict: true needs a model with a token for tool calls; use tool_choice "
                '"required" with this one.',
                param="tools",
            )
        think = [tag for tag in (OPEN, CLOSE) if tag in self._added]
        self._rule("text", " | ".join(["TEXT", *think]))
        self._rule("TEXT", "/(?s:.+)/")
        return self._grammar("(text | call)*")

    def calls_or_answer(self, answer: str, *, parallel: bool, after_think: bool) -> str:
        """Calls alone, or an answer of a form of its own.

        Args:
            answer: the form, as the body of a rule.
            parallel: there may be several calls.
            after_think: the answer follows a think block, with an empty line between them.
        """
        self._rule("answer", answer)
        self._rule("calls", self._calls(parallel=parallel))
        return self._grammar(f"{_LEAD if after_think else ''} (calls | answer)")

    def _tool(self, number: int, tool: CallableTool) -> str:
        name = f"call_{number}"
        body = self._xml_body(name, tool) if self._xml else self._json_body(name, tool)
        self._rule(name, f"{self._tag(CALL)} {body} {self._tag(CALL_END)}")
        return name

    def _json_body(self, rule: str, tool: CallableTool) -> str:
        schema = parameters_schema(tool.schema)
        self._rule(f"{rule}_arguments", json_rule(schema, strict=tool.strict))
        start = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
        return f"{_literal(start)} {rule}_arguments {_literal('}' + chr(10))}"

    def _xml_body(self, rule: str, tool: CallableTool) -> str:
        schema = parameters_schema(tool.schema)
        try:
            schema = plain_parameters(schema)
        except NotExpressible as error:
            if tool.strict:
                raise _unsupported(tool, error) from None
        properties = schema.get("properties")
        parts = [_literal(f"\n<function={tool.name}>\n")]
        if isinstance(properties, Mapping) and (properties or is_closed(schema)):
            required = schema.get("required")
            required = required if isinstance(required, list) else []
            for number, key in enumerate(properties):
                try:
                    value = self._xml_value(f"{rule}_{number}", schema, key, strict=tool.strict)
                except NotExpressible as error:
                    raise _unsupported(tool, error, key) from None
                parameter = f"{_literal(f'<parameter={key}>' + chr(10))} {value}"
                parts.append(parameter if key in required else f"({parameter})?")
        else:
            parts.append(f'("<parameter=" /[^<>\\n]+/ ">\\n" {self._free_value()})*')
        return " ".join([*parts, _literal("</function>\n")])

    def _xml_value(self, rule: str, schema: Mapping[str, Any], key: str, *, strict: bool) -> str:
        types = value_types(schema, key)
        definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        if not types or "string" in types:
            value = text_value(schema, key, strict=strict)
            if value is None:
                return self._free_value()
            terminals, schemas = value.terminals, value.schemas
        else:
            terminals, schemas = [], [schema["properties"][key]]
        ways = []
        if terminals:
            name = rule.upper()
            self._rule(name, " | ".join(terminals))
            self._rule(f"{rule}_text[lazy]", f"{name} /{END}/")
            ways.append(f"{rule}_text")
        for number, part in enumerate(schemas):
            whole = {**part, **definitions}
            if strict and has_foreign_reference(whole):
                raise NotExpressible("$ref")
            self._rule(f"{rule}_json_{number}", json_rule(whole, strict=strict))
            ways.append(f"{rule}_json_{number} /{END}/")
        return f"({' | '.join(ways)})"

    def _free_value(self) -> str:
        """Any text, up to the tag that ends it."""
        self._rule("FREE_TEXT", any_text())
        self._rule("free_value[lazy]", f"FREE_TEXT /{END}/")
        return "free_value"

    def _calls(self, *, parallel: bool) -> str:
        return 'call ("\\n" call)*' if parallel else "call"

    def _tag(self, tag: str) -> str:
        return tag if tag in self._added else _literal(tag)

    def _rule(self, name: str, body: str) -> None:
        self._rules[name] = body

    def _grammar(self, start: str) -> str:
        rules = [f"{name}: {body}" for name, body in self._rules.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, ""])


def _literal(text: str) -> str:
    return json.dumps(text)


def _unsupported(
    tool: CallableTool, error: NotExpressible, key: str | None = None
) -> UnsupportedParameterError:
    where = "its schema" if key is None else f"its parameter {json.dumps(key)}"
    return UnsupportedParameterError(
        f"strict: true can't be kept for the tool {json.dumps(tool.name)} with this model's format "
        f"of calls: {where} has {json.dumps(error.keyword)} in a form that no grammar enforces "
        "here. Leave out strict, or that keyword.",
        param="tools",
    )


def json_rule(schema: Mapping[str, Any], *, strict: bool) -> str:
    """A JSON value as the body of a rule.

    Args:
        schema: that it fits.
        strict: words of the schema that no grammar knows are an error.
    """
    options: dict[str, Any] = {"whitespace_pattern": JSON_WHITESPACE}
    if not strict:
        # A tool may be forced whose schema is more than a grammar can express.
        options["lenient"] = True
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"
