"""Processes for work on clients' input that can hang or crash."""
