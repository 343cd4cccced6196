"""The bytes that Keepsight writes: one file for each format."""
