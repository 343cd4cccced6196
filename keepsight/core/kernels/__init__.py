"""Linear layers and attention whose rows do not depend on the rows beside them. May import models
and below.

`passes` puts them in the place of torch's own, in this thread and for as long as one of our passes
runs; a user's own calls of a model are never changed. `linear` and `attention` are the kernels.
Nothing of it is assumed of a machine: `keepsight.core.any_cut` finds out what holds.
"""
