"""Fingerprints of a live model: everything that a forward pass reads."""
