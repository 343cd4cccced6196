"""The private thing of torch by which a list of operations becomes a function of TorchScript.

It is a row of `upstream`, which has no room left.
"""

from __future__ import annotations

from keepsight.models.private import PrivateApi

FUNCTION = PrivateApi(
    "torch._C",
    "_create_function_from_graph",
    "to run recorded steps",
    without="each step runs the model's own code",
)
