"""Grammars that answers must follow, compiled from schemas and tools."""
