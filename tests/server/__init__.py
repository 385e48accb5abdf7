"""The HTTP server, the command line, the backend and the hub: with a scripted engine."""
