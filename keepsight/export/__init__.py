"""Graphs for other runtimes, and features for other engines. May import vlm and below.

    tracing  how a decoder looks to a tracer: states in, states out
    parts    embedding, decoder and head as graphs
    towers   the tower as a graph
    making   all of them into a folder, compared with the model before anybody may use it
    check    that comparison

`keepsight.runtimes` runs what is made here.
"""
