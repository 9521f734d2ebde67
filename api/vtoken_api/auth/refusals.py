"""Refused calls (401, 403, 429): all are counted, few are logged.

Credentials are never logged. Refused calls are not in the audit log, because anyone who can reach
the port could fill it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus

from starlette.types import Scope

from vtoken_api.auth.access import address_of
from vtoken_api.log import logger

LOG_PERIOD_S = 10.0
REFUSED = (401, 403, 429)  # HTTP statuses


class Refusals:
    """`counts` by HTTP status, cumulative; at most one log line in LOG_PERIOD_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[int] = Counter()
        self._clock = clock
        self._next_log = -1.0
        self._unlogged = 0

    def note(self, scope: Scope, status: int) -> None:
        """Count an answer with one of REFUSED and log it, unless a line was logged within
        LOG_PERIOD_S.
        """
        self.counts[status] += 1
        now = self._clock()
        if now < self._next_log:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} more since the last line" if self._unlogged else ""
        self._next_log, self._unlogged = now + LOG_PERIOD_S, 0
        logger.warning(
            "vtoken: refused %s %s from %s: %d %s%s",
            scope.get("method", "stream"),
            scope["path"][:128].encode("unicode_escape").decode(),
            address_of(scope.get("client")),
            status,
            HTTPStatus(status).phrase,
            more,
        )
