"""Passes over stretches of sequences: lanes, guessed tokens, sampling, text."""
