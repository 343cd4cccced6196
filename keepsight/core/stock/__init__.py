"""Calls in the form of stock Transformers: tensors in, tensors out."""
