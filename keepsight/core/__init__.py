"""One turn: rendered, matched, prefilled, decoded and remembered."""
