"""An OpenAI-compatible server; `app.build` makes it. May import keepsight, encode and below.

A request passes `access`, its route (`chat`, `responses`, `cache`, ...), which checks it with
`schema`, and `media`, which opens its pictures; `service` is what all routes share, and `page` what
a browser shows.
"""
