"""Tools put together from parts, so that none is learned by heart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo_model.dice import Dice
from demo_model.phrasing import in_words, invented, sometimes_invented, with_article
from demo_model.tools.field_table import FIELDS
from demo_model.tools.fields import Field, Schema
from demo_model.words import ALL_WORDS, CITIES, COLORS, NAMES, OBJECTS

# Words of a tool's name, how a request says it, the parameters it needs, others it may have.
ACTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("get weather", "what is the weather", "city", "unit days"),
    ("get weather", "how is the weather", "city", "unit date"),
    ("get forecast", "get the forecast", "city", "days unit"),
    ("get temperature", "tell me the temperature", "city", "unit"),
    ("get time", "what time is it", "city", ""),
    ("send email", "send an email", "email title", "text"),
    ("send message", "send a message", "person text", "priority notify"),
    ("create task", "create a task", "title", "date priority tags person"),
    ("create note", "save a note", "title text", "tags"),
    ("add event", "add an event", "title date", "time minutes notify"),
    ("schedule meeting", "schedule a meeting", "date time", "person minutes title"),
    ("set timer", "set a timer", "minutes", "title"),
    ("set reminder", "set a reminder", "text", "date time"),
    ("book table", "book a table", "city people", "date time"),
    ("book hotel", "book a hotel", "city days", "people date price"),
    ("search web", "search the web for something", "query", "limit language"),
    ("search products", "look for products", "query", "price color limit"),
    ("find recipe", "find a recipe", "query", "limit"),
    ("get stock", "check the stock", "item", "detailed"),
    ("order item", "place an order", "item quantity", "color address"),
    ("ship parcel", "ship a parcel", "address", "priority size"),
    ("cancel order", "cancel the order", "id", "notify"),
    ("update ticket", "update the ticket", "id", "priority person text"),
    ("track parcel", "track the parcel", "code", "detailed"),
    ("translate text", "translate a text", "text language", ""),
    ("export report", "export the report", "format", "date title detailed"),
    ("create invoice", "make an invoice", "person price", "date tags"),
    ("compute average", "compute the average", "numbers", "detailed"),
    ("compute sum", "compute the sum", "numbers", ""),
    ("resize image", "resize the image", "path size", "format"),
    ("read file", "show what is written", "path", "limit"),
    ("print document", "print the document", "path", "quantity color"),
    ("paint wall", "paint the wall", "color", "size date"),
    ("rent car", "rent a car", "city days", "color price"),
    ("add contact", "add a contact", "person email", "address tags"),
)
_VERBS = [
    "get",
    "set",
    "make",
    "find",
    "send",
    "open",
    "run",
    "check",
    "list",
    "update",
    "create",
    "delete",
    "start",
    "move",
    "build",
]


@dataclass(frozen=True)
class Tool:
    """A tool, and what its parameters mean.

    Args:
        definition: in OpenAI's form.
        words: of its name, "get weather".
        action: how a request says what it does; "" for one that is called by its name.
        kinds: of each parameter, by its name; None where there is no more than a type.
    """

    definition: dict[str, Any]
    words: str
    action: str
    kinds: dict[str, Field | None]

    @property
    def name(self) -> str:
        """Of the function."""
        return str(self.definition["function"]["name"])

    @property
    def parameters(self) -> Schema:
        """JSON schema of the arguments."""
        return dict(self.definition["function"]["parameters"])


def any_tool(dice: Dice) -> Tool:
    """A tool that does something, or one that has nothing but names."""
    return named_tool(dice) if dice.chance(0.2) else action_tool(dice, *dice.pick(ACTIONS))


def action_tool(dice: Dice, words: str, action: str, needed: str, more: str) -> Tool:
    """A tool for an action, with its parameters in any order, described or not."""
    wanted = needed.split()
    required = list(wanted)
    wanted += [each for each in more.split() if dice.chance(0.5)]
    dice.shuffle(wanted)
    described = dice.chance(0.5)
    properties: dict[str, Schema] = {}
    kinds: dict[str, Field | None] = {}
    must: list[str] = []
    for each in wanted:
        field = FIELDS[each]
        plain = dice.chance(0.5)
        names = [name for name in field.names if name not in properties]
        name = names[0] if plain else dice.pick(names)
        if not plain and dice.chance(0.2) and "_" in name:
            name = camel(name)
        schema = field.schema(dice)
        if described:
            schema = {**schema, "description": dice.pick(field.descriptions)}
        properties[name] = schema
        kinds[name] = field
        if each in required or dice.chance(0.15):
            must.append(name)
    verb, noun = words.split()
    forms = (
        f"{verb.capitalize()} the {noun}.",
        f"{verb.capitalize()}s {with_article(noun)} for the user.",
    )
    description = dice.pick(forms) if dice.chance(0.6) else None
    made = definition(dice, _function_name(dice, words), description, properties, must)
    return Tool(made, words, action, kinds)


def named_tool(dice: Dice) -> Tool:
    """A tool that no one knows: its request names it and its parameters."""
    words = f"{dice.pick(_VERBS)} {sometimes_invented(dice, ALL_WORDS, 0.5)}"
    properties: dict[str, Schema] = {}
    for _ in range(dice.number(0, 4)):
        name = sometimes_invented(dice, ALL_WORDS, 0.4)
        if dice.chance(0.3):
            name += f"_{dice.pick(('id', 'name', 'count', 'type', 'list', 'flag'))}"
        properties[name] = dice.pick(_PLAIN_TYPES)
    must = [name for name in properties if dice.chance(0.8)]
    made = definition(dice, _function_name(dice, words), None, properties, must)
    return Tool(made, words, "", dict.fromkeys(properties))


_PLAIN_TYPES: tuple[Schema, ...] = (
    {"type": "string"},
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "string", "enum": ["on", "off", "auto"]},
    {"type": "string", "enum": ["small", "medium", "large"]},
)


def plain_value(dice: Dice, schema: Schema) -> tuple[Any, str]:
    """A value of a type, and how it is written in a request."""
    if "enum" in schema:
        value: Any = dice.pick(schema["enum"])
        return value, value
    kind = schema["type"]
    if kind == "string":
        value = dice.pick((invented(dice), dice.pick(NAMES), dice.pick(CITIES), dice.pick(OBJECTS)))
        return value, dice.pick((value, f'"{value}"', f"'{value}'"))
    if kind == "boolean":
        value = dice.chance(0.5)
        return value, "true" if value else "false"
    if kind == "array":
        value = [sometimes_invented(dice, COLORS, 0.3) for _ in range(dice.number(1, 3))]
        return value, in_words(value)
    value = dice.number(0, 9999) if kind == "integer" else dice.number(0, 9999) / 100
    return value, str(value)


def definition(
    dice: Dice, name: str, description: str | None, properties: dict[str, Schema], must: list[str]
) -> dict[str, Any]:
    """A function in OpenAI's form, with more or less of what clients add."""
    parameters: Schema = {"type": "object", "properties": properties}
    if must or dice.chance(0.3):
        parameters["required"] = must
    if dice.chance(0.15):
        parameters["additionalProperties"] = False
    if dice.chance(0.05):
        parameters = {"$schema": "http://json-schema.org/draft-07/schema#", **parameters}
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def _function_name(dice: Dice, words: str) -> str:
    parts = words.split()
    kind = dice.random()
    if kind < 0.65:
        return "_".join(parts)
    if kind < 0.8:
        return camel("_".join(parts))
    if kind < 0.86:
        return "-".join(parts)
    if kind < 0.92:
        return ".".join(reversed(parts))
    return f"mcp__{sometimes_invented(dice, ALL_WORDS, 0.5)}__{'_'.join(parts)}"


def camel(name: str) -> str:
    """getWeather for get_weather."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
