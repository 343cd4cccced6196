"""An OpenAI-compatible server over one model that remembers; `app.build` is the way in."""
