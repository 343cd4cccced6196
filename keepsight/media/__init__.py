"""A picture, from what the caller gave to its name and its features."""
