"""All kinds of parameters by a name of their own."""

from __future__ import annotations

from demo_model.phrasing import invented, sometimes_invented
from demo_model.tools.fields import (
    Field,
    address,
    address_schema,
    amount,
    array_schema,
    boolean_schema,
    chosen,
    city,
    clock,
    copied,
    counted,
    date,
    enum_schema,
    integer_schema,
    mail,
    note,
    number_schema,
    numbers,
    path,
    person,
    size,
    size_schema,
    string_schema,
    switched,
    tags,
    title,
    topic,
)
from demo_model.words import COLORS, LANGUAGES, OBJECTS

FIELDS: dict[str, Field] = {
    "city": Field(
        ("city", "location", "town", "place", "city_name", "where"),
        ("The city", "Name of the city", "Where to look, e.g. Rome"),
        string_schema,
        copied("in {}", city),
    ),
    "unit": Field(
        ("unit", "units", "scale", "temperature_unit"),
        ("Unit of temperature", "The unit"),
        enum_schema(
            ("celsius", "fahrenheit"),
            ("celsius", "fahrenheit"),
            ("celsius", "fahrenheit", "kelvin"),
        ),
        chosen("in {}", "in degrees {}"),
    ),
    "days": Field(
        ("days", "num_days", "duration", "nights"),
        ("Number of days", "How many days"),
        integer_schema,
        counted("for {} days", high=30, low=2),
    ),
    "minutes": Field(
        ("minutes", "duration_minutes", "length", "duration"),
        ("Minutes", "How long, in minutes"),
        integer_schema,
        counted("for {} minutes", high=180, low=2),
    ),
    "date": Field(
        ("date", "day", "when", "start_date"),
        ("The day", "When it happens"),
        string_schema,
        copied("on {}", date),
    ),
    "time": Field(
        ("time", "at", "start_time", "hour"),
        ("Time of day, HH:MM", "When"),
        string_schema,
        copied("at {}", clock),
    ),
    "person": Field(
        ("to", "recipient", "person", "user", "assignee", "contact"),
        ("Who it is for", "The person"),
        string_schema,
        copied("for {}", person),
    ),
    "email": Field(
        ("email", "email_address", "address", "cc"),
        ("E-mail address",),
        string_schema,
        copied("to {}", mail),
    ),
    "quantity": Field(
        ("quantity", "amount", "count", "qty"),
        ("How many", "Number of pieces"),
        integer_schema,
        counted("{} of them", "{} pieces", low=2),
    ),
    "people": Field(
        ("people", "guests", "party_size", "seats"),
        ("Number of guests",),
        integer_schema,
        counted("for {} people", high=20, low=2),
    ),
    "limit": Field(
        ("limit", "max_results", "top_k", "n"),
        ("Most results",),
        integer_schema,
        counted("with at most {} results", "and show {} results", high=50),
    ),
    "price": Field(
        ("price", "max_price", "budget", "total"), ("In dollars",), number_schema, amount
    ),
    "language": Field(
        ("language", "target_language", "lang", "into"),
        ("The language",),
        string_schema,
        copied("into {}", lambda dice: dice.pick(LANGUAGES)),
    ),
    "title": Field(
        ("title", "subject", "name", "heading"),
        ("The title", "Short title"),
        string_schema,
        copied("titled '{}'", title),
    ),
    "text": Field(
        ("text", "body", "message", "content", "note"),
        ("The text", "What it says"),
        string_schema,
        copied("saying '{}'", note),
    ),
    "query": Field(
        ("query", "q", "search", "keywords", "topic"),
        ("What to look for", "Search words"),
        string_schema,
        copied("about {}", topic),
    ),
    "color": Field(
        ("color", "colour"),
        ("The color",),
        string_schema,
        copied("in {}", lambda dice: dice.pick(COLORS)),
    ),
    "item": Field(
        ("item", "product", "item_name", "article"),
        ("Name of the item",),
        string_schema,
        copied("of the {}", lambda dice: sometimes_invented(dice, OBJECTS, 0.25)),
    ),
    "id": Field(
        ("id", "ticket_id", "order_id", "number", "ref"),
        ("Its number", "The id"),
        integer_schema,
        counted("number {}", "with the id {}", high=99999),
    ),
    "code": Field(
        ("code", "sku", "reference", "token"),
        ("The code",),
        string_schema,
        copied("with the code {}", lambda dice: f"{invented(dice).upper()}-{dice.number(1, 999)}"),
    ),
    "path": Field(
        ("path", "file", "file_path", "filename"),
        ("Path of the file",),
        string_schema,
        copied("in the file {}", path),
    ),
    "priority": Field(
        ("priority", "importance", "level"),
        ("How important it is",),
        enum_schema(("low", "medium", "high"), ("low", "normal", "urgent")),
        chosen("with {} priority"),
    ),
    "format": Field(
        ("format", "output_format", "type"),
        ("Format of the result",),
        enum_schema(("pdf", "csv", "json"), ("text", "html", "markdown")),
        chosen("as {}", "in {} format"),
    ),
    "notify": Field(
        ("notify", "send_notification", "notifications"),
        ("Whether to notify",),
        boolean_schema,
        switched("with notifications", "without notifications"),
    ),
    "detailed": Field(
        ("detailed", "include_details", "verbose", "full"),
        ("Whether to give details",),
        boolean_schema,
        switched("with details", "without details"),
    ),
    "tags": Field(
        ("tags", "labels", "keywords", "categories"),
        ("Tags",),
        array_schema({"type": "string"}),
        tags,
    ),
    "numbers": Field(
        ("numbers", "values", "data"), ("The numbers",), array_schema({"type": "number"}), numbers
    ),
    "address": Field(
        ("address", "destination", "delivery_address", "target"),
        ("Where to",),
        address_schema,
        address,
    ),
    "size": Field(("size", "dimensions", "format_size"), ("Width and height",), size_schema, size),
}
