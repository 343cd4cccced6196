"""One turn: rendered, matched, prefilled, decoded, remembered. May import prefix, report and
below.

`turn` shows the seven steps, `runtime` holds the live model and what is remembered of it, `answer`
is the way from messages to pieces that every call takes. `rendering` makes prompts of messages,
`decoding` answers of prompts, `kernels` computes both with equal bits at any cut, `trials` finds
out where that holds, and `stock` takes and gives tensors as Transformers does.
"""
