"""Requests to one model that share the engine: `Together` takes them, each gets a `Ticket`."""

from keepsight.scheduler.scheduler import Together
from keepsight.scheduler.ticket import Ticket

__all__ = ["Ticket", "Together"]
