"""Checkpoints of true shapes with seeded random weights; `python -m scripts.synthetic --help`."""
