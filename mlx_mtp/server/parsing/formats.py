"""Which format a model writes its reasoning and its tool calls in, and a parser for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_mtp.server.parsing import harmony
from mlx_mtp.server.parsing.answer import AnswerParser, PlainParser, ThinkThenTools
from mlx_mtp.server.parsing.harmony import HarmonyParser
from mlx_mtp.server.parsing.hermes import HermesParser
from mlx_mtp.server.parsing.qwen_xml import QwenXmlParser
from mlx_mtp.server.parsing.think import CLOSE, OPEN, ThinkParser
from mlx_mtp.server.parsing.tool_parser import ToolParser

AUTO = "auto"
NONE = "none"
GPT_OSS = "gpt_oss"
QWEN3 = "qwen3"
HERMES = "hermes"
QWEN3_CODER = "qwen3_coder"

_TOOL_PARSERS: dict[str, type[ToolParser]] = {HERMES: HermesParser, QWEN3_CODER: QwenXmlParser}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A model's format.

    Args:
        reasoning: "qwen3", "gpt_oss" or "none".
        tools: "hermes", "qwen3_coder", "gpt_oss" or "none".
    """

    reasoning: str
    tools: str

    @classmethod
    def choose(cls, template: str, reasoning: str = AUTO, tools: str = AUTO) -> OutputFormat:
        """The format that a chat template shows to the model, where a flag doesn't name another."""
        if reasoning == AUTO:
            reasoning = GPT_OSS if "<|channel|>" in template else QWEN3
        if reasoning == GPT_OSS and tools != NONE:
            tools = GPT_OSS  # The one format is for both.
        if tools == AUTO:
            tools = QWEN3_CODER if "<function=" in template else HERMES
        return cls(reasoning, tools)

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the parser has to see in the text."""
        if self.reasoning == GPT_OSS:
            return harmony.MARKERS
        return (OPEN, CLOSE, "<tool_call>", "</tool_call>")

    @property
    def has_tools(self) -> bool:
        """Tool calls can be read."""
        return self.tools != NONE

    def opens_thinking(self, prompt: str) -> bool:
        """The template ended the prompt within a think block, so that the answer begins in it."""
        return self.reasoning == QWEN3 and prompt.rstrip().endswith(OPEN)

    def parser(
        self,
        *,
        thinking: bool,
        schemas: Mapping[str, Mapping[str, Any]] | None,
        max_calls: int | None = None,
    ) -> AnswerParser:
        """A parser for one answer.

        Args:
            thinking: as `opens_thinking` told.
            schemas: the JSON schema of each tool's parameters, by its name; None: no tools.
            max_calls: the answer ends with so many calls.
        """
        if self.reasoning == GPT_OSS:
            return HarmonyParser(with_tools=schemas is not None, max_calls=max_calls)
        kind = _TOOL_PARSERS.get(self.tools)
        tools = kind(schemas, max_calls) if kind is not None and schemas is not None else None
        think = None
        if self.reasoning == QWEN3:
            think = ThinkParser(opened=thinking, with_tools=tools is not None)
        if think is None and tools is None:
            return PlainParser()
        return ThinkThenTools(think, tools)
