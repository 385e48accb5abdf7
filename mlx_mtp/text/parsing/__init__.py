"""Parses a model's text, as it arrives, into events: reasoning, content and tool calls."""
