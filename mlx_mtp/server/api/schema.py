"""What all APIs' request bodies are made of: limits, types, refusals and shared models."""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mlx_mtp.bounded_json import JSONBoundError, check_value, has_half_character
from mlx_mtp.sampling.bad_words import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS
from mlx_mtp.sampling.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    SamplingParams,
)
from mlx_mtp.server.api.compat import ANY, MAX_IGNORED, MAX_NAME, NEUTRAL, REFUSED, SYNONYMS
from mlx_mtp.server.generation import inputs, pictures
from mlx_mtp.server.generation.inputs import AnswerOptions
from mlx_mtp.server.http.errors import FORM as FORM
from mlx_mtp.server.http.errors import UNSUPPORTED

MAX_MESSAGES = 4096  # messages of a chat, and parts of a message: far more than fit a context
MAX_TOOLS = 1024  # tools of a chat, and tool calls of a message
MAX_VALUES = 1 << 16  # JSON values in a tool's parameters, and in the arguments of a tool call
MAX_FIELDS = 100  # fields of an object in a body
MAX_PROMPT_IDS = 1 << 20  # token ids of one prompt, whatever the model's context
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_LABEL_CHARACTERS = 512
MAX_LABELS = 64  # entries of `metadata` and of `chat_template_kwargs`


def refusal(message: str, *, field: str | None = None, unsupported: bool = False) -> Exception:
    """Returns an error for a validator to raise; `unsupported`: the server lacks the feature."""
    kind = UNSUPPORTED if unsupported else "refused"
    return PydanticCustomError(kind, "{message}", {"message": message, "field": field})


def at_most(limit: int) -> BeforeValidator:
    """Limit a list or object before its items are validated, unlike `max_length`."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            raise refusal(f"has {len(value)} entries; at most {limit} are allowed")
        return value

    return BeforeValidator(check)


def text_or_list(items: str, item_of: Callable[[str], object]) -> BeforeValidator:
    """Take a string as a list of one item, and refuse what is neither a string nor a list."""

    def as_list(value: object) -> object:
        if isinstance(value, str):
            return [item_of(value)]
        if not isinstance(value, list):
            raise refusal(f"must be a string or a list of {items}")
        return value

    return BeforeValidator(as_list)


_NOT_SHOWN = re.compile(r"[^\w.\[\]-]", re.ASCII)
_PLACES: dict[type, tuple[type, str]] = {}  # by model: the model and the field that have it


class WireModel(BaseModel):
    """A strict model: no coercion, and an explicit null means that the field is absent.

    An unknown field is dropped if its value is neutral (`compat`). Otherwise it is an error, or, if
    the validation's context is a list, dropped and noted in this list.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, field in cls.model_fields.items():
            for inner, mark in _models_in(field.annotation):
                _PLACES.setdefault(inner, (cls, f"{field.alias or name}{mark}."))
        _path_to.cache_clear()  # Defaults of fields cache paths before the outer model exists.

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: object, info: ValidationInfo) -> object:
        if not isinstance(data, dict):
            raise refusal("Input should be a valid dictionary")
        if len(data) > MAX_FIELDS:
            raise refusal(f"has {len(data)} fields; at most {MAX_FIELDS} are allowed")
        known, place = _field_names(cls), _path_to(cls)
        given: dict[str, Any] = {}
        for key, value in data.items():
            if value is None or (not place and is_neutral(key, value)):
                continue
            if key in known:
                given[key] = value
                continue
            same = () if place else SYNONYMS.get(key, ())
            name = next((other for other in same if other in known), key)
            others = (data.get(name), given.get(name)) if name != key else ()
            if any(other not in (None, value) for other in others):
                raise refusal(f"differs from {name}; give one of them", field=key)
            if name in known or not is_foreign(place + key, value, info.context, key):
                given[name] = value
        return given


def is_foreign(place: str, value: object, ignored: list[str] | None, field: str) -> bool:
    """Returns True if an unknown parameter may be dropped; raises the refusal of one in `REFUSED`.

    `place` is its path (see `compat`), and `field` its name in an error.
    """
    if is_neutral(place, value):
        return True
    if place in REFUSED:
        raise refusal(REFUSED[place], field=field, unsupported=True)
    if ignored is not None:
        note_ignored(ignored, place)
    return ignored is not None


def is_neutral(name: str, value: object) -> bool:
    """Returns True if a parameter with this value changes nothing."""
    return name in NEUTRAL and any(
        each is ANY or (each == value and isinstance(each, bool) == isinstance(value, bool))
        for each in NEUTRAL[name]
    )


def note_ignored(ignored: list[str], name: str) -> None:
    """Add a parameter's name to the reported ones, shortened and made safe for a header."""
    name = _NOT_SHOWN.sub("?", name[: MAX_NAME + 1]) or "?"
    name = name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."
    if name not in ignored and len(ignored) < MAX_IGNORED:
        ignored.append(name)


@cache
def _field_names(kind: type[WireModel]) -> frozenset[str]:
    """Returns the names of a model's fields as clients write them."""
    names: set[str] = set()
    for name, field in kind.model_fields.items():
        alias = field.validation_alias or name
        names |= {alias} if isinstance(alias, str) else {str(n) for n in alias.choices}  # type: ignore[union-attr]
    return frozenset(names)


@cache
def _path_to(kind: type) -> str:
    """Returns the path of field names to a model; the first one of several."""
    outer, name = _PLACES.get(kind, (None, ""))
    return name if outer is None else _path_to(outer) + name


def _models_in(annotation: Any, mark: str = "") -> Iterator[tuple[type, str]]:
    if isinstance(annotation, type) and issubclass(annotation, WireModel):
        yield annotation, mark
    for inner in get_args(annotation):
        yield from _models_in(inner, "[]" if get_origin(annotation) is list else mark)


def few_values(value: Any) -> Any:
    """Limit a value that a template may write as JSON, which blocks all threads meanwhile."""
    try:
        check_value(value, max_values=MAX_VALUES)
    except JSONBoundError as error:
        raise refusal(str(error)) from None
    return value


def _whole_characters(arguments: str) -> str:
    if has_half_character(arguments, few_values(inputs.object_or_text(arguments))):
        raise refusal("its JSON has half of a surrogate pair, which is no character")
    return arguments


def is_id(value: object) -> bool:
    """Returns True if a value can be a token id of some model."""
    return isinstance(value, int) and not isinstance(value, bool)


def joined_text(*kinds: str, of_assistants: tuple[str, ...] = ()) -> BeforeValidator:
    """Join a list of text and image parts of the types `kinds`; other types are refused by name.

    Messages of role assistant may also have parts of the types `of_assistants`, but no images.
    """

    def joined(value: object, info: ValidationInfo) -> object:
        if not isinstance(value, list):
            return value
        known = kinds
        if info.data.get("role") == "assistant":
            known = (*(kind for kind in kinds if kind not in pictures.PARTS), *of_assistants)
        texts = []
        for number, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind not in known:
                message = f"part {number} has type {json.dumps(kind)[:80]}"
                taken = "text and images" if pictures.PARTS.intersection(known) else "text"
                raise refusal(f"{message}, but this server takes {taken} only", unsupported=True)
            if kind in pictures.PARTS:
                texts.append(image_text(part, f"part {number}"))
                continue
            key = "refusal" if kind == "refusal" else "text"
            given = {
                name
                for name, inner in part.items()
                if inner is not None
                and (
                    name in ("type", key)
                    or not is_foreign(f"content[].{name}", inner, info.context, name)
                )
            }
            if given != {"type", key} or not isinstance(part[key], str):
                form = f'{{"type": "{kind}", "{key}": "..."}}'
                raise refusal(f"part {number} must have the form {form}")
            texts.append(part[key])
        return "".join(texts)

    return BeforeValidator(joined)


def image_text(part: dict[str, Any], name: str = "") -> str:
    """Returns an image part as a span of text (see `pictures`); `name` is its name in errors."""
    try:
        return pictures.from_part(part)
    except ValueError as error:
        raise refusal(f"{name}: {error}" if name else str(error)) from None


def known_only(*kinds: str) -> BeforeValidator:
    """Drop and note a list's items that are not in `kinds`; an object counts by its `type`."""

    def known(value: object, info: ValidationInfo) -> object:
        if not isinstance(value, list) or info.context is None:
            return value
        items = []
        for item in value:
            kind = item.get("type") if isinstance(item, dict) else item
            if isinstance(kind, str) and kind not in kinds:
                note_ignored(info.context, f"{info.field_name}[].{kind}")
            else:
                items.append(item)
        return items

    return BeforeValidator(known)


def unless_dropped(is_dropped: Callable[[str], object]) -> WrapValidator:
    """Replace a tool of a dropped type by None, and note it: the model doesn't see the tool."""

    def tool_or_none(
        value: object, validate: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or not is_dropped(kind):
            return validate(value)
        if info.context is not None:
            note_ignored(info.context, f"tools[].{kind}")
        return None

    return WrapValidator(tool_or_none)


without_none = AfterValidator(lambda items: [item for item in items if item is not None])


def _without_empty(value: list[object], info: ValidationInfo) -> list[object]:
    # Empty fields of a client's form become empty stop strings, which can't be meant.
    if "" not in value or info.context is None:
        return value
    note_ignored(info.context, info.field_name or "")
    return [each for each in value if each != ""]


def only(neutral: object) -> AfterValidator:
    """Refuse all values except `neutral`, which changes nothing."""

    def check(value: Any) -> Any:
        if value != neutral:
            raise refusal(f"this server supports only {json.dumps(neutral)}", unsupported=True)
        return value

    return AfterValidator(check)


def _is_scalar(value: object) -> object:
    if isinstance(value, str | int | float | bool):
        return value
    raise refusal("must be a string, a number or a boolean")


def _in_64_bits(value: int, info: ValidationInfo) -> int:
    """Refuse longer integers without quoting them in full; the sampler checks exact ranges."""
    if -(1 << 63) <= value < 1 << 63:
        return value
    if (limits := RANGES.get(info.field_name or "")) is None:
        raise refusal(f"an integer of {len(str(abs(value)))} digits is out of range")
    limit = f"most {limits.high}" if value > 0 else f"least {limits.low}"
    raise refusal(f"must be at {limit}")


Model = TypeVar("Model", bound=WireModel)
Item = TypeVar("Item")
Many = Annotated[list[Item], FailFast(), at_most(MAX_MESSAGES)]
OneOrMore = Annotated[list[Item], FailFast(), Field(min_length=1), at_most(MAX_MESSAGES)]
ManyTools = Annotated[list[Item], FailFast(), at_most(MAX_TOOLS)]
Int = Annotated[int, AfterValidator(_in_64_bits)]
Float = Annotated[float, Field(allow_inf_nan=False)]
ModelName = Annotated[str, Field(max_length=256)]  # "" means the served model
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[
    list[_Stop],
    BeforeValidator(_without_empty),
    at_most(MAX_STOPS),
    text_or_list("strings", str),
]
StopTokenIds = Annotated[list[Int], FailFast(), at_most(MAX_STOP_TOKEN_IDS)]
AllowedTokenIds = Annotated[list[Int], FailFast(), at_most(MAX_ALLOWED_TOKEN_IDS)]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
BadWordTexts = Annotated[list[_BadWord], FailFast(), at_most(MAX_BAD_WORDS)]
LogitBias = Annotated[dict[str, Float], at_most(MAX_LOGIT_BIAS)]
_Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]  # OpenAI's limit
Labels = Annotated[dict[_Label, _Label], at_most(MAX_LABELS)]
Scalar = Annotated[Any, BeforeValidator(_is_scalar)]
TemplateKwargs = Annotated[dict[str, Scalar], at_most(MAX_LABELS)]
Arguments = Annotated[str, AfterValidator(_whole_characters)]
Parsed = Annotated[Any, BeforeValidator(few_values)]  # added by the openai package's parse()
Schema = Annotated[dict[str, Any], BeforeValidator(few_values)]
OnlyFalse = Annotated[bool, only(False)]

_JSON_TYPES: dict[Any, Any] = {int: Int, float: Float, bool: bool}
_JSON_TYPES |= {tuple[int, ...]: StopTokenIds, tuple[tuple[int, float], ...]: LogitBias}
_JSON_TYPES[tuple[int, ...] | None] = AllowedTokenIds
_HINTS = get_type_hints(SamplingParams)
# The fields of `SamplingParams` that clients may set.
SAMPLING = {name: _JSON_TYPES[hint] for name, hint in _HINTS.items() if hint in _JSON_TYPES}
del SAMPLING["choice"], SAMPLING["optimistic"]  # These follow from the body's `n` and `mtp`.


def sampled(*names: str) -> Callable[[type[Model]], type[Model]]:
    """Add the fields `names` of `SamplingParams` to a body, without names all of `SAMPLING`."""

    def with_fields(kind: type[Model]) -> type[Model]:
        # Not `| None`: an explicit null is removed before a field's type is checked.
        fields: Any = {name: (SAMPLING[name], None) for name in names or SAMPLING}
        return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, **fields)

    return with_fields


class AnswerRequest(WireModel):
    """The fields that all requests for an answer have."""

    model: ModelName = ""
    stream: bool = False
    cache_salt: CacheSalt | None = None

    def sampling(self, **more: Any) -> dict[str, Any]:
        # Returns the given fields of `SamplingParams`; `more` are those with other names here.
        same = {name: getattr(self, name, None) for name in SAMPLING}
        return {n: value for n, value in (*same.items(), *more.items()) if value is not None}

    @abstractmethod
    def options(self) -> AnswerOptions: ...


class OpenAILabels(WireModel):
    """Labels, which change no answer; OpenAI's own servers act on none of them either."""

    user: str | None = None
    metadata: Labels | None = None
    safety_identifier: str | None = None


class Function(WireModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool = False

    def tool(self) -> inputs.Tool:
        return inputs.Tool(self.name, self.description, self.parameters, self.strict)


def form_by_type(
    message: str, *, word: str | None = None, role: str | None = None
) -> Discriminator:
    """Returns the discriminator of a union whose tags are the values of `type`.

    Without a `type`, objects with a role have the tag `role`, and strings the tag `word`.
    """

    def form(value: object) -> str | None:
        if isinstance(value, dict):
            kind = value.get("type", role if "role" in value else None)
        else:
            kind = getattr(value, "type", word)
        return FORM + kind if isinstance(kind, str) else None

    return Discriminator(form, custom_error_type=UNSUPPORTED, custom_error_message=message)


NamedToolT = TypeVar("NamedToolT", bound=WireModel)
AllowedToolsT = TypeVar("AllowedToolsT", bound=WireModel)
_CHOICES = 'must be "auto", "none", "required", or an object of type "function" or "allowed_tools"'
# For OpenAI's two APIs, which nest the names of tools differently.
OpenAIToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag(FORM + "word")]
    | Annotated[NamedToolT, Tag(FORM + "function")]
    | Annotated[AllowedToolsT, Tag(FORM + "allowed_tools")],
    form_by_type(_CHOICES, word="word"),
]


def tool_choice(choice: Any) -> inputs.ToolChoice:
    """Returns the tool choice of a request to one of OpenAI's two APIs."""
    if isinstance(choice, str):
        return inputs.ToolChoice(choice)  # type: ignore[arg-type]
    if choice.type == "function":
        return inputs.ToolChoice("required", frozenset({choice.name}))
    allowed = getattr(choice, "allowed_tools", choice)
    return inputs.ToolChoice(allowed.mode, frozenset(tool.name for tool in allowed.tools))
