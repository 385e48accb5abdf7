"""Events that are told at once."""

from __future__ import annotations

from mlx_mtp.server.parsing.events import Reasoning, Text, ToolArguments, ToolStart, merged


def test_neighbouring_pieces_of_one_text_are_one():
    events = [Reasoning("a"), Reasoning("b"), Text("c", 20), Text("d", 21), ToolStart(0, "f")]
    calls = [ToolArguments(0, "{"), ToolArguments(0, "}"), Text("e", 40)]
    assert merged([*events, *calls]) == [
        Reasoning("ab"),
        Text("cd", 20),
        ToolStart(0, "f"),
        ToolArguments(0, "{}"),
        Text("e", 40),
    ]


def test_texts_with_something_hidden_between_them_keep_their_places():
    events = [Text("ab", 3), Text("c", 5), Text("d", 9)]
    assert merged(events) == [Text("abc", 3), Text("d", 9)]
