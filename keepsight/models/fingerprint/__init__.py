"""What names a live model: everything that a forward pass reads."""
