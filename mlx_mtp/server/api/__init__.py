"""The APIs: the forms of their requests and answers, and their routes."""
