"""`keepsight bench`: against stock Transformers and the limit. May import keepsight and below.

It builds a random-weight checkpoint, or takes a named model (an exported one too), runs the
workloads in one process, prints tables for people and one line of JSON for machines.
`bench/README.md` explains what is measured and how to read it.
"""
