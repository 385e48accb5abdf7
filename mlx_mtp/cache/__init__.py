"""Caches of running rows of different lengths: attention KV and recurrent states."""
