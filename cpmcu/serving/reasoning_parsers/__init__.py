"""Parsers that separate reasoning from content, one file for each pair of tags."""
