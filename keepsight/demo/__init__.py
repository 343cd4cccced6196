"""The tiny models that ship, and the pictures they know. May import nothing."""
