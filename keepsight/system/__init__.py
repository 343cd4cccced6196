"""Locks, forks, devices, units, optional libraries, HTML for notebooks, the end of
the process, digests. May import errors and kinds."""
