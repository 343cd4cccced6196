"""A loaded model, what its results depend on, and family-specific code. May import store and
below.

`families` has what only one model type knows, a file each; `fingerprint` finds out whether a live
model or processor changed. `loading` makes models of names, `weights` names their weights,
`environment` names all else that changes bits, and `upstream` has every private name of
Transformers that is used.
"""
