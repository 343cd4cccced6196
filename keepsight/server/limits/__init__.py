"""What a request must pass before a route sees it: callers, sizes, turns, rates."""
