"""Kernels of the gated delta rule: each with a portable path that is its reference."""
