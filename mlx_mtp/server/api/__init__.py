"""The APIs: what their requests and answers look like."""
