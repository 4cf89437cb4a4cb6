"""A conversation becomes a prompt, and the model's text an answer."""
