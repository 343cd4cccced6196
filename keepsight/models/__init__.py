"""A loaded model, what its results depend on, and family-specific code. May import store and
below."""
