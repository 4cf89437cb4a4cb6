"""Tokens as text, and the sandbox of chat templates."""
