"""Many requests on one model, decoded together on one thread. May import vlm and below."""

from keepsight.scheduler.scheduler import Together
from keepsight.scheduler.ticket import Ticket

__all__ = ["Ticket", "Together"]
