"""Exported graphs in place of a model's modules. May import core and below."""
