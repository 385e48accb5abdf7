"""Drafts: where they come from, how many, and which are accepted."""
