"""Tasks with a right answer."""
