"""Where pages of prompts are kept after their sequences: here on disk, by model and by key."""
