"""Caches of rows of different lengths, and how a rejected draft is taken back."""
