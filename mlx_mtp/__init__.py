"""OpenAI-compatible MLX server with multi-token prediction under continuous batching."""

__version__ = "0.1.0"
