"""Whose turn it is among accounts: nobody has more of the model by asking more at a time.

Whoever has one request under way is never held back. An account with several waits while another
one has had less of the model's time, since both have had work: its requests together get no more
than one request gets. Beside a single request it gets a third of what that one gets, and waits
until that one has had as much as it would have had behind its next piece of work, which is never
broken off: who asks for little is answered first. Salts of one tenant are one account.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

# What the time of an account with several requests counts. A piece of work is never broken off, and
# many requests cost the interpreter time beside the model too: with equal shares who asks for
# little would wait for more than half of the time.
_SEVERAL = 3.0


class Shares:
    """Seconds of the model's time by account, of those that have requests under way."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._piece: dict[str, float] = {}  # what an account has at a time, of late
        self.under_way: Counter[str] = Counter()

    def enter(self, account: str) -> None:
        """One more request of an account is under way. Who comes has had as much as those who are
        there: time in which one asked for nothing is not made up for."""
        if account not in self._spent:
            self._spent[account] = min(self._spent.values(), default=0.0)
        self.under_way[account] += 1

    def leave(self, account: str) -> None:
        """One of them is over."""
        self.under_way[account] -= 1
        if not self.under_way[account]:
            del self.under_way[account], self._spent[account]
            self._piece.pop(account, None)

    def spend(self, accounts: Sequence[str], seconds: float) -> None:
        """Time that some requests had together, one entry for each."""
        for account, count in Counter(accounts).items():
            if account in self._spent:
                weight = _SEVERAL if self.under_way[account] > 1 else 1.0
                had = weight * seconds * count / len(accounts)
                self._spent[account] += had
                self._piece[account] = max(had, 0.9 * self._piece.get(account, 0.0))

    def spend_beside(self, account: str, seconds: float) -> None:
        """Time of a processor that was taken from everybody, beside the model's. One request at a
        time is not charged for it."""
        if self.under_way[account] > 1:
            self._spent[account] += _SEVERAL * seconds

    def is_held_back(self, account: str) -> bool:
        """Whether an account with several requests has had as much as another one, or more."""
        if self.under_way[account] < 2:
            return False
        mine, piece = self._spent.get(account, 0.0), self._piece.get(account, 0.0)
        return any(
            spent <= mine + (piece if self.under_way[other] == 1 else 0.0)
            for other, spent in self._spent.items()
            if other != account
        )
