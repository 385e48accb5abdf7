"""Parsers."""
