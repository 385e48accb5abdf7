"""The bundled model: package data."""
