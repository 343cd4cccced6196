"""Conversations that keep their history, are saved, and watch videos; prepared prefixes. May import
stock and below."""

from keepsight.session.session import Session

__all__ = ["Session"]
