"""Measures step costs while the server is idle, and keeps them in a file."""
