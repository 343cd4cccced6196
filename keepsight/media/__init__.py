"""A picture, from what the caller gave to its features. May import models and below."""
