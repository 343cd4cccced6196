"""From a checkpoint to graphs for other runtimes: models that see and remember without PyTorch's.

    tracing  how a decoder looks to a tracer: states in, states out
    parts    embedding, decoder and head as graphs
    towers   the tower as a graph
    making   all of them into a folder, compared with the model before anybody may use it
    check    that comparison

`keepsight.runtimes` runs what is made here.
"""
