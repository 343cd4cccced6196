"""The engine: prompts rendered, matched, read, decoded, remembered. May import prefix, report and
below.

`engine` is the loop that answers every call, `sequence` one prompt and its answer as data,
`runtime` holds the live model and what is remembered of it, `answer` is the way from messages to a
sequence. `rendering` makes prompts of messages,
`decoding` answers of prompts, `kernels` computes both with equal bits at any cut, `trials` finds
out where that holds, and `stock` takes and gives tensors as Transformers does.
"""
