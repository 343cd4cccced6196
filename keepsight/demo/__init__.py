"""The tiny trained models, the pictures they know, and the tour that shows what they remember."""
