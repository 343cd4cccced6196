"""Requests to one model that share the engine: `Together` takes them, each gets a `Ticket`."""

from keepsight.together.scheduler import Together
from keepsight.together.ticket import Ticket

__all__ = ["Ticket", "Together"]
