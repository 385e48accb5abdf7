"""How much a model thinks before it answers: the ways in which clients say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.server.conversation import Conversation

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

BUDGETS: Mapping[str, int] = {"minimal": 512, "low": 2048}
"""Most tokens to think at an effort; at the higher ones the model thinks as long as it likes."""
BUDGET_FIELD = "chat_template_kwargs.thinking_budget"
MAX_BUDGET = 1 << 31
_BUDGET = "thinking_budget"


def split_template_kwargs(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The kwargs that are the template's, and the thinking budget, which is the server's.

    Raises:
        InvalidRequestError: the budget is no count of tokens.
    """
    rest = dict(kwargs)
    budget = rest.pop(_BUDGET, None)
    if budget is None:
        return rest, None
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget < MAX_BUDGET:
        raise InvalidRequestError(
            f"{BUDGET_FIELD} must be a number of tokens, 0 or more.", param=BUDGET_FIELD
        )
    return rest, budget


def with_effort(conversation: Conversation, effort: Effort | None) -> Conversation:
    """The same conversation, with as much thinking as OpenAI's `reasoning_effort` asks for.

    What the client set in its `chat_template_kwargs` goes before it.
    """
    if effort is None:
        return conversation
    budget = conversation.thinking_budget
    return replace(
        conversation,
        thinking=effort != "none",
        thinking_budget=BUDGETS.get(effort) if budget is None else budget,
        effort=effort,
    )
