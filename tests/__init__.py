"""The test suite; each file says on top what it holds."""
