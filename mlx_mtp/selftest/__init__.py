"""`mlx-mtp selftest`: what this machine makes of the kernels, the engine and MTP, in one table."""
