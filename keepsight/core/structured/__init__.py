"""Answers of a form that was asked for: what is wanted, and the grammar that enforces it."""
