"""Conversations that keep their history, are saved, and watch videos. May import core and below."""

from keepsight.session.session import Session

__all__ = ["Session"]
