"""Reuse of prompts' prefixes: a radix tree of snapshots, its policy, and copies on disk."""
