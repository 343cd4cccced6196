"""An OpenAI-compatible server; `app.build` makes it. May import keepsight, encode and below.

A request passes `limits`, its route in `api`, and `media`, which opens its pictures; `service` is
what all routes share, and `page` what a browser shows.
"""
