"""Linear layers and attention whose rows do not depend on neighbouring rows. May import models and
below.

`passes` puts them in place of torch's own functions, in this thread and only while one of our
passes runs. A user's own calls of a model never change. `linear` and `attention` are the kernels.
`keepsight.core.any_cut` finds out what holds on this machine.
"""
