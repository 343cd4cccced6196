"""Locks, forks, devices, units, optional libraries, the end of the process. May import errors."""
