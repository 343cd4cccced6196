"""A loaded model, what its results depend on, and what only its family knows. May import store and
below.
"""
