"""Tries on the model at hand what is exact: any cut, a graph, an unlisted model type."""
