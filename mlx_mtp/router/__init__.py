"""Several models at one address: a parent process without mlx, and a process for each model."""
