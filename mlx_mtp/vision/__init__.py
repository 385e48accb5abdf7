"""Images as a model reads them: decoded, placed in a prompt, and as rows beside its embeddings."""
