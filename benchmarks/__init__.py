"""Measurements. Each prints the command, the machine, and ratios of things measured in one run."""
