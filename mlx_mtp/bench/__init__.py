"""Measures any OpenAI-compatible server over HTTP, or the engine alone."""
