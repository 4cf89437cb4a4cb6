"""The terminal: the only package part that prints."""
