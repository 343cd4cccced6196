"""Graphs for other runtimes, and features for other engines. May import vlm and below.

    tracing  a decoder as a tracer sees it: states in, states out
    parts    embedding, decoder and head as graphs
    towers   the tower as a graph
    making   writes all of them into a folder, after a comparison with the model
    check    that comparison

`keepsight.runtimes` runs the result.
"""
