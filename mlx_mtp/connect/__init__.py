"""`mlx-mtp connect`: what a client needs in its configuration to use a running server."""
