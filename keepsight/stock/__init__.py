"""Inside other people's code: calls in the form of stock Transformers. May import core and below.

`generate` takes and gives tensors, `installed` and `forward` stand in a live model, `inputs` feeds
stock code, `verify` and `probe` compare with it.
"""
