"""Requests and responses of the HTTP interface. All pydantic models are in this package."""
