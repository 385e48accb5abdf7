"""The engine: scheduler, runner and thread. Requests in, tokens out."""
