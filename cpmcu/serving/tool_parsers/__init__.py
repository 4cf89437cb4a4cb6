"""Parsers of tool calls, one file for each notation."""
