"""The test suite; each module's docstring says what the module tests."""
