"""Locks, forks, devices, units, and the end of the process. May import errors."""
