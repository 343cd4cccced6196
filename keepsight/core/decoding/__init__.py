"""Passes over segments of sequences: lanes, guessed tokens, sampling, text."""
