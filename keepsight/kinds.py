"""The plain types that rooms share, so that each is spelled once. May import nothing.

They say what a value is for; what is inside is checked where it comes in.
"""

from __future__ import annotations

from typing import Any, TypeAlias

# What a file's record, a request or a table says: text keys, plain JSON values.
Record: TypeAlias = dict[str, Any]
# Keyword arguments on their way to the function that knows them; unknown ones are refused by name.
Options: TypeAlias = dict[str, Any]
# Keyword arguments of a forward pass: tensors, and upstream's own records of them.
Inputs: TypeAlias = dict[str, Any]
# A chat message as Transformers and OpenAI shape it: a role, and a text or a list of parts.
Message: TypeAlias = dict[str, Any]
