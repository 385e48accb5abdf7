"""How much to think, in the words of OpenAI, Qwen, Anthropic, OpenRouter and Ollama."""

from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from mlx_mtp.server.api.schema import WireModel, refusal
from mlx_mtp.server.generation.conversation import Effort

Budget = Annotated[int, Field(ge=0, lt=1 << 31)]


class Wish(WireModel):
    """One field's wish; what it leaves out is up to the model."""

    enabled: bool | None = None
    type: Literal["enabled", "disabled", "adaptive"] | None = None
    effort: Effort | None = None
    max_tokens: Budget | None = Field(
        default=None, validation_alias=AliasChoices("max_tokens", "budget_tokens")
    )
    exclude: bool = False  # think, but leave it out of the answer

    def said(self) -> dict[str, Any]:
        """What is said of `thinking`, `effort` and `budget`."""
        thinking = {"enabled": True, "disabled": False}.get(self.type or "", self.enabled)
        if thinking is None and (self.effort or self.max_tokens):
            thinking = self.effort != "none"
        found = {"thinking": thinking, "effort": self.effort, "budget": self.max_tokens}
        return {name: value for name, value in found.items() if value is not None}


_FORMS = {bool: "enabled", str: "effort", int: "max_tokens"}
_Wish = Annotated[
    Wish,
    BeforeValidator(lambda given: {_FORMS[type(given)]: given} if type(given) in _FORMS else given),
]


class ThinkingFields(WireModel):
    """The fields of a chat for it. Several may be given if they agree."""

    reasoning_effort: Effort | None = None
    reasoning: _Wish | None = None  # OpenRouter
    enable_thinking: _Wish | None = None  # Qwen
    thinking: _Wish | None = None  # Anthropic, DeepSeek
    think: _Wish | None = None  # Ollama
    thinking_budget: _Wish | None = None  # Qwen
    include_reasoning: bool = True  # OpenRouter, vLLM

    @model_validator(mode="after")
    def _agree(self) -> Self:
        self.wish()
        return self

    @property
    def hides_reasoning(self) -> bool:
        return not self.include_reasoning or any(wish.exclude for _, wish in self._wishes())

    def wish(self) -> dict[str, Any]:
        """What all of them say together, as `Wish.said`."""
        found: dict[str, Any] = {}
        for field, wish in self._wishes():
            for name, value in wish.said().items():
                if found.setdefault(name, value) != value:
                    raise refusal(f"contradicts another field about {name}", field=field)
        return found

    def _wishes(self) -> list[tuple[str, Wish]]:
        values = {field: getattr(self, field) for field in ThinkingFields.model_fields}
        if self.reasoning_effort is not None:
            values["reasoning_effort"] = Wish(effort=self.reasoning_effort)
        return [(field, value) for field, value in values.items() if isinstance(value, Wish)]
