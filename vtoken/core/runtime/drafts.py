"""How many drafts were accepted, in all and under each of the newest revisions.

Eviction may let a drafter predict worse. A rejected draft costs time and never a token, so a share
that falls makes answers slower, not wrong.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.wire import DraftFigures, Serving

NUM_REVISIONS = 8


class DraftTally:
    """Counts the drafts of each step, in `totals` too."""

    def __init__(self, active: ActiveConfig, totals: Serving) -> None:
        self._active = active
        self._totals = totals
        self._figures: deque[DraftFigures] = deque(maxlen=NUM_REVISIONS)  # newest first

    def add(self, num_proposed: int, num_rejected: int) -> None:
        """A step has verified `num_proposed` drafts, and rejected so many of them."""
        if num_proposed == 0 or self._active.of_step is None:
            return
        _, revision = self._active.of_step
        if not self._figures or self._figures[0].revision != revision:
            self._figures.appendleft(DraftFigures(revision=revision))
        newest, num_accepted = self._figures[0], num_proposed - num_rejected
        newest.proposed_tokens += num_proposed
        newest.accepted_tokens += num_accepted
        self._totals.draft_tokens += num_proposed
        self._totals.accepted_draft_tokens += num_accepted

    def document(self) -> list[DraftFigures]:
        """The figures of each revision, newest first."""
        return [replace(figures) for figures in self._figures]
