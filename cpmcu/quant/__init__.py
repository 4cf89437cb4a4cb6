"""Quantisation schemes. Each file recognises one scheme and selects the C++ linear method."""
