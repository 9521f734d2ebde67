"""What requests gave for blocks that were short, and what finished requests had lost at their end.

Independent of policies and blocks.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vtoken.wire import MAX_FINISHED, RequestDetail

WINDOW_S = 10.0
# Upper bounds of the shares of `FinishedLog.kept_shares`.
KEPT_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)
REPORTED = (
    "live",
    "dead",
    "given_tokens",
    "preemptions",
    "policy",
    "budget_tokens",
    "asked_budget_tokens",
    "evict_when",
    "evict_during",
)


class GivenTally:
    """The tokens given in the last `WINDOW_S` seconds, and by how many requests."""

    def __init__(self) -> None:
        self._given: deque[tuple[float, str, int]] = deque()

    def note(self, request_id: str, num_tokens: int) -> None:
        """`request_id` gave `num_tokens` now."""
        self._given.append((time.monotonic(), request_id, num_tokens))
        self._forget()

    def recent(self) -> tuple[int, int]:
        """Tokens, and requests that gave them."""
        self._forget()
        names = {request_id for _, request_id, _ in self._given}
        return sum(tokens for *_, tokens in self._given), len(names)

    def since_s(self) -> float:
        """Seconds since the newest token was given; `WINDOW_S` if none was within it."""
        self._forget()
        return time.monotonic() - self._given[-1][0] if self._given else WINDOW_S

    def _forget(self) -> None:
        oldest = time.monotonic() - WINDOW_S
        while self._given and self._given[0][0] < oldest:
            self._given.popleft()


def kept_share(ended: RequestDetail) -> float:
    """The live share of all tokens."""
    num_tokens = ended.live + ended.dead
    return ended.live / num_tokens if num_tokens else 1.0


def answer_report(ended: RequestDetail) -> dict[str, Any]:
    """What the answer says of a request that has ended, JSON-compatible."""
    values = ((name, getattr(ended, name)) for name in REPORTED)
    return {name: value for name, value in values if value is not None}


@dataclass(slots=True)
class FinishedLog:
    """The newest `MAX_FINISHED` finished requests.

    `kept_shares`: how many of all kept at most each share of `KEPT_SHARES`, and more than the one
    before. `kept_sum`: the sum of their shares.
    """

    kept_shares: list[int] = field(default_factory=lambda: [0] * len(KEPT_SHARES))
    kept_sum: float = 0.0
    _newest: OrderedDict[str, RequestDetail] = field(default_factory=OrderedDict)

    def add(self, ended: RequestDetail) -> None:
        share = kept_share(ended)
        self.kept_sum += share
        self.kept_shares[bisect_left(KEPT_SHARES, share)] += 1
        self._newest.pop(ended.id, None)
        self._newest[ended.id] = ended
        if len(self._newest) > MAX_FINISHED:
            self._newest.popitem(last=False)

    def get(self, request_id: str) -> RequestDetail | None:
        return self._newest.get(request_id)

    def ids(self) -> Iterable[str]:
        """Those of the requests that `get` finds, oldest first."""
        return self._newest.keys()
