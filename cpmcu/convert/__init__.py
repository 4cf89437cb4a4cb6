"""Checkpoints into other checkpoints, without a GPU: `python -m cpmcu.convert --help`."""
