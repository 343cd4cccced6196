"""Locks, forks, devices, units, optional libraries, HTML for notebooks, the end of
the process. May import errors."""
