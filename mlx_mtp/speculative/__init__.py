"""Speculation: sources of drafts, their acceptance, and how many are proposed."""
