"""Processes for work on clients' input that may never end, or end its process."""
