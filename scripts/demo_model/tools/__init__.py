"""Tools as clients send them, requests that need them, and what comes back."""
