"""Requests in, tokens out: scheduler, runner, thread."""
