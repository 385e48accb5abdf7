"""Kernels for CUDA alone."""
