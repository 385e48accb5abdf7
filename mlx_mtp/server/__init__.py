"""HTTP: wire models, chat template, detokenizing, server-sent events. No mlx here."""
