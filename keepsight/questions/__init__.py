"""Much asked of one beginning: decisions, scores, and many questions. May import core and below.

`group` reads prompts that begin alike together, `prompts` builds those of decisions, and `decide`,
`score` and `many` turn what comes out into answers.
"""
