"""What the request bodies of all APIs are made of: limits, types of fields, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mlx_mtp.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from mlx_mtp.server.conversation import object_or_text
from mlx_mtp.server.text import has_half_character

MAX_MESSAGES = 4096
"""Most messages of a chat, and most parts of a message: far above what fits a context."""
MAX_TOOLS = 1024
"""Most tools of a chat, and most tool calls of a message."""
MAX_VALUES = 1 << 16
"""Most values within one tool's parameters, and within the arguments of one tool call."""
MAX_LEVELS = 128
"""Most objects and lists within each other there: whoever writes them recurses."""
MAX_FIELDS = 100
"""Most fields of an object of the API."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_PROMPT_IDS = 1 << 20
"""Most token ids of one prompt, whatever the model's context."""
MAX_SALT_CHARACTERS = 256
MAX_LABELS = 64
"""Most entries of `metadata` and of `chat_template_kwargs`."""
MAX_LABEL_CHARACTERS = 512
"""Longest name and value of `metadata`, as OpenAI has it."""

FORM = "\0"
"""Begins the tag of a union's form, which pydantic puts among the names of fields."""
UNSUPPORTED = "unsupported"
"""The pydantic error type that becomes an UnsupportedParameterError."""


def refusal(message: str, *, field: str | None = None, unsupported: bool = False) -> Exception:
    """An error for a validator to raise.

    Args:
        message: what is wrong and what would be right.
        field: the field at fault, where the validator sees more than that.
        unsupported: the value makes sense, but this server does not offer it.
    """
    kind = UNSUPPORTED if unsupported else "refused"
    return PydanticCustomError(kind, "{message}", {"message": message, "field": field})


def at_most(limit: int) -> BeforeValidator:
    """Count the items of a list or an object before any of them is looked at.

    `Field(max_length=...)` looks at each, and collects an error for each that is wrong.
    """

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            raise refusal(f"has {len(value)} entries; at most {limit} are allowed")
        return value

    return BeforeValidator(check)


class WireModel(BaseModel):
    """Strict: no coercion, no unknown fields; an explicit null means that the field is absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise refusal(f"has {len(data)} fields; at most {MAX_FIELDS} are allowed")
        return {key: value for key, value in data.items() if value is not None}


def few_values(value: Any) -> Any:
    """Bound what a template has to write as JSON, which holds up every thread while it lasts."""
    left, level, depth = MAX_VALUES, [value], 0
    while level:
        if depth > MAX_LEVELS:
            raise refusal(f"is nested more than {MAX_LEVELS} levels deep")
        inner = [each for each in level if isinstance(each, dict | list)]
        left -= sum(map(len, inner))
        if left < 0:
            raise refusal(f"has too many values in it; at most {MAX_VALUES} are allowed")
        level = [v for each in inner for v in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return value


def whole_characters(arguments: str) -> str:
    """Check a call's arguments, JSON or not; a template may have to write them."""
    value = few_values(object_or_text(arguments))
    try:
        half = has_half_character(arguments, value)
    except RecursionError:
        raise refusal("its JSON is nested too deeply") from None
    if half:
        raise refusal("its JSON has half of a surrogate pair, which is no character")
    return arguments


def is_id(value: object) -> bool:
    """It may be a token id; its range is the model's to check."""
    return isinstance(value, int) and not isinstance(value, bool)


def only(neutral: object) -> Callable[[Any], Any]:
    """Let the value through that changes nothing; refuse the feature by its name."""

    def check(value: Any) -> Any:
        if value != neutral:
            raise refusal(f"this server supports only {json.dumps(neutral)}", unsupported=True)
        return value

    return check


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_scalar(value: object) -> object:
    if isinstance(value, str | int | float | bool):
        return value
    raise refusal("must be a string, a number or a boolean")


# Exact ranges are the sampler's to check; this keeps integers that fit nowhere out of messages too.
Int = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Float = Annotated[float, Field(allow_inf_nan=False)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]
"""Who doesn't know it can't tell, by the time to the first token, that such a prompt was here."""
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], at_most(MAX_STOPS), BeforeValidator(_as_list)]
StopTokenIds = Annotated[list[Int], FailFast(), at_most(MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[str, Float], at_most(MAX_LOGIT_BIAS)]
_Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]
Labels = Annotated[dict[_Label, _Label], at_most(MAX_LABELS)]
Scalar = Annotated[Any, BeforeValidator(_is_scalar)]
TemplateKwargs = Annotated[dict[str, Scalar], at_most(MAX_LABELS)]
Parsed = Annotated[Any, BeforeValidator(few_values)]
"""What the openai package's parse() made of an answer's text, which stands beside it."""
Retention = Literal["in_memory", "in-memory", "24h"]
"""How long OpenAI's caches keep a prompt; its own description has had both spellings."""
OnlyFalse = Annotated[bool, AfterValidator(only(False))]
