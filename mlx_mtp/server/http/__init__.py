"""Connections, access, admission, bodies and errors: HTTP code that is independent of models."""
