"""Caches for rows of different lengths, and prefixes of earlier requests."""
