"""Drafters, which draft tokens for the target to verify: one file for each kind."""
