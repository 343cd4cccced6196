"""An OpenAI-compatible server; `app.build` makes it. May import keepsight, scheduler, encode and
below.
"""
