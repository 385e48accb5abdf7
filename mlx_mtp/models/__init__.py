"""mlx-lm's models on our caches, and the MTP head."""
