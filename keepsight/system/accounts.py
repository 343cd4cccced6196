"""Accounts for quotas: a tenant together with all of its salts.

A salt divides a tenant's memory into isolated parts. The quota is for the tenant as a whole: a new
salt gets none of its own.
"""

from __future__ import annotations

_SALT = "\x1f"  # in no name that a person writes


def under_salt(tenant: str, salt: str) -> str:
    """The tenant that owns the memory under a salt; the salt is a digest."""
    return f"{tenant}{_SALT}{salt}"


def account_of(tenant: str) -> str:
    """The tenant whose quota it counts against."""
    return tenant.partition(_SALT)[0]
