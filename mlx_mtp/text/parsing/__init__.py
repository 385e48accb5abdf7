"""A model's text to events: reasoning, content and tool calls, piece by piece as it comes."""
