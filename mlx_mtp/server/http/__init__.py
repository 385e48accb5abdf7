"""Connections, access, admission, bodies and errors: HTTP that knows no model."""
