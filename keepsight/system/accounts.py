"""Whose memory counts together: a tenant's own, and that under each of its salts.

A salt divides a tenant's memory into parts that see nothing of each other. What may be kept is the
tenant's as a whole: a new salt does not get a quota of its own.
"""

from __future__ import annotations

_SALT = "\x1f"  # in no name that a person writes


def under_salt(tenant: str, salt: str) -> str:
    """The tenant that has the memory under a salt; the salt is a digest."""
    return f"{tenant}{_SALT}{salt}"


def account_of(tenant: str) -> str:
    """The tenant whose quota it counts against."""
    return tenant.partition(_SALT)[0]
