"""A store at an fsspec address: whole objects, listed instead of catalogued."""
