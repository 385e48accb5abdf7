"""What an answer must look like, from all that a request says of it."""

import json
from collections.abc import Container
from dataclasses import replace

from mlx_mtp.errors import InvalidRequestError, UnsupportedParameterError
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.conversation import Conversation
from mlx_mtp.server.parsing.formats import HERMES, NONE, QWEN3_CODER, OutputFormat
from mlx_mtp.server.parsing.qwen import CALL, CLOSE, OPEN
from mlx_mtp.server.parsing.tool_grammar import Rules, call_rules, json_rule

_ENFORCED = (HERMES, QWEN3_CODER)


def check_tools(conversation: Conversation, output_format: OutputFormat) -> None:
    """Raise InvalidRequestError or UnsupportedParameterError for what no answer could fulfil."""
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
    """Most tool calls of one answer; None: as many as the model makes."""
    choice = conversation.tool_choice
    named = choice.mode == "required" and len(choice.names or ()) == 1
    return 1 if named or not conversation.parallel_tool_calls else None


def answer_grammar(
    conversation: Conversation,
    output_format: OutputFormat,
    added_tokens: Container[str],
    *,
    thinking: bool,
) -> GrammarSpec | None:
    """The grammar of the answer; None leaves it free. RequestError: it can't be enforced.

    If `thinking`, the answer begins within a think block, which is left free, within its budget.
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
        rules = call_rules(tools, added_tokens, xml=xml)
        grammar = GrammarSpec("lark", _lark(conversation, rules, added_tokens, thinking=thinking))
    budget = conversation.thinking_budget
    if not thinking or (grammar is None and budget is None):
        return grammar
    return replace(grammar or GrammarSpec("free"), free_until=CLOSE, free_tokens=budget)


def _lark(
    conversation: Conversation, rules: Rules, added_tokens: Container[str], *, thinking: bool
) -> str:
    """The grammar of an answer that may have calls, in llguidance's Lark."""
    required, response = conversation.tool_choice.mode == "required", conversation.response
    if required or response is not None:
        rules["calls"] = "call" if max_calls(conversation) == 1 else r'call ("\n" call)*'
        rules["answer"] = "calls" if required or response is None else _rule(response)
        start = r"/\n{0,2}/ (calls | answer)" if thinking else "calls | answer"
    else:
        # Calls may stand within text, or be missing.
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


def _rule(response: GrammarSpec) -> str:
    """The form of an answer as the body of a rule in llguidance's Lark."""
    if response.kind == "json_schema":
        return json_rule(json.loads(response.value), strict=True)
    if response.kind == "json_object":
        return json_rule({"type": "object"}, strict=True)
    if response.kind == "choice":
        return " | ".join(json.dumps(choice) for choice in json.loads(response.value))
    raise UnsupportedParameterError(
        f"An answer in the form of a {response.kind} can't be combined with tools.",
        param="tools",
    )
