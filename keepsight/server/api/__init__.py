"""The routes, the bodies they take and the events they send."""
