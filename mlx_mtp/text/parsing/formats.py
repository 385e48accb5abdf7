"""The format in which a model writes its reasoning and its tool calls, and a parser for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_mtp.text.parsing.answer import AnswerParser
from mlx_mtp.text.parsing.harmony import MARKERS, HarmonyParser
from mlx_mtp.text.parsing.qwen import QwenParser
from mlx_mtp.text.parsing.tags import CALL, CALL_END, CLOSE, OPEN

AUTO = "auto"
NONE = "none"
GPT_OSS = "gpt_oss"
QWEN3 = "qwen3"
HERMES = "hermes"
QWEN3_CODER = "qwen3_coder"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A model's format."""

    reasoning: str  # "qwen3", "gpt_oss" or "none"
    tools: str  # "hermes", "qwen3_coder", "gpt_oss" or "none"

    @classmethod
    def of_template(cls, template: str, reasoning: str = AUTO, tools: str = AUTO) -> OutputFormat:
        """Returns the format that a chat template describes, unless flags name another."""
        if reasoning == AUTO:
            reasoning = GPT_OSS if "<|channel|>" in template else QWEN3
        if reasoning == GPT_OSS and tools != NONE:
            tools = GPT_OSS  # This format has both.
        if tools == AUTO:
            tools = QWEN3_CODER if "<function=" in template else HERMES
        return cls(reasoning, tools)

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the parser must see in the text."""
        return MARKERS if self.reasoning == GPT_OSS else (OPEN, CLOSE, CALL, CALL_END)

    def parser(
        self,
        *,
        thinking: bool,
        schemas: Mapping[str, Mapping[str, Any]] | None,
        max_calls: int | None = None,
    ) -> AnswerParser:
        """Returns a parser for one answer, which begins within a think block if `thinking`."""
        if self.reasoning == GPT_OSS:
            return HarmonyParser(schemas=schemas, max_calls=max_calls)
        return QwenParser(
            think=self.reasoning == QWEN3, opened=thinking, schemas=schemas, max_calls=max_calls
        )
