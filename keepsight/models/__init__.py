"""A loaded model, what its results depend on, and family-specific code. May import store and
below.

`families` has what only one model type knows, a file each. `loading` makes models of names,
`identity` says what a live model or processor is and whether it changed, `environment` names all
else that changes bits, and `upstream` has every private name of Transformers that is used.
"""
