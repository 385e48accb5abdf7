"""`mlx-mtp selftest`: how kernels, engine and MTP work on this machine, in one table."""
