"""Protocols around the engine: chat templates, and the OpenAI-compatible server."""
