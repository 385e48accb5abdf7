"""Turns validated requests into engine requests, and the engine's outputs into answers."""
