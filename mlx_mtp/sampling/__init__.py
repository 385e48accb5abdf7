"""From logits to tokens, one seeded draw per position."""
