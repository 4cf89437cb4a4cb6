"""Converts checkpoints to other formats, without a GPU: `python -m cpmcu.convert --help`."""
