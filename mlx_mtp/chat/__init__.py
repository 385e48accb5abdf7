"""`mlx-mtp chat`: a conversation in the terminal, with a running server or its own."""
