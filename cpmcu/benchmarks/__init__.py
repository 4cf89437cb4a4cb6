"""What `python -m cpmcu.bench` measures."""
