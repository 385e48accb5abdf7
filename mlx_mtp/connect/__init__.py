"""`mlx-mtp connect`: the configuration that clients need to use a running server."""
