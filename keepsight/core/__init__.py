"""One turn: rendered, matched, prefilled, decoded, remembered. May import prefix, report and
below."""
