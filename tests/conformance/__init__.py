"""Other projects' own tests, run against a real server. They are downloaded, never copied here."""
