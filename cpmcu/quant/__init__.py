"""Quantisation schemes: one file each recognises a checkpoint and names the C++ linear method."""
