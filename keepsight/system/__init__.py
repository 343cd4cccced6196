"""Locks, forks, devices, and the end of the process. May import errors."""
