"""`mlx-mtp inspect`: whether a model fits this machine, what it is, and what to do next."""
