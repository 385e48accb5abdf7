"""Text whose continuation branches: stories, descriptions, explanations, letters, and filler."""
