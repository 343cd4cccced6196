"""Exported graphs in the place of a model's modules."""
