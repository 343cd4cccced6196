"""Tries on the model at hand whether any cut is exact, and keeps what was found."""
