"""Protocols around the engine: chat templates now, HTTP later."""
