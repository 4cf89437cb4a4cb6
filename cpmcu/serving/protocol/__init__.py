"""Requests and responses of the HTTP interface, as pydantic models; pydantic is used only here."""
