"""The engine: prompts matched, read, decoded, remembered. May import prompt, report and below.

`engine` is the loop that answers every call, `sequence` one prompt and its answer as data,
`runtime` holds the live model and what is remembered of it, `answer` is the way from messages to a
sequence, and `together` serves many callers from a thread of its own. `decoding` makes answers of
prompts, `kernels` computes both with equal bits at any cut, `any_cut` finds out where that holds.
"""
