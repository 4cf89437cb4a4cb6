"""The engine thread and everything between a request and C.Engine."""
