"""OpenAI's responses, without any state."""
