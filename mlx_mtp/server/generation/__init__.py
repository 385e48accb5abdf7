"""From a validated request to the deltas of its answers."""
