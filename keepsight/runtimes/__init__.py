"""Exported graphs in the place of a model's modules. May import core and below."""
