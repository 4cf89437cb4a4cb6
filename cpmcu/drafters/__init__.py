"""What drafts tokens for the target to verify: one file for each kind of draft."""
