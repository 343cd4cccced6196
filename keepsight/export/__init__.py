"""Graphs for other runtimes, and features for other engines. May import vlm and below.

`graphs` writes the embedding, the decoder, the head and the tower of a model as graphs, once they
gave the model's own results; `keepsight.runtimes` runs them. `runtime_choice` makes such a folder
when a caller names a runtime. `engines` gives features to vLLM and SGLang.
"""
