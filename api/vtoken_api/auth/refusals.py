"""Calls that were turned away at the door (401, 403, 429): counted all, logged seldom.

Knows who came from where for what, never what they showed. They are not in the audit log, which
holds what was done: anyone who reaches the port could fill it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from starlette.types import Scope

from vtoken_api.auth.access import address_of
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError

LOG_PERIOD_S = 10.0
STATUSES = (401, 403, 429)


class Refusals:
    """`counts` by HTTP status, cumulative; at most one log line in LOG_PERIOD_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[int] = Counter()
        self._clock = clock
        self._next_line = -1.0
        self._silent = 0

    def note(self, scope: Scope, error: ProblemError) -> None:
        """Count a refused call, and say so in the log when it is time."""
        status = error.problem.status
        if status not in STATUSES:
            return
        self.counts[status] += 1
        now = self._clock()
        if now < self._next_line:
            self._silent += 1
            return
        more = f"; {self._silent} more since the last line" if self._silent else ""
        self._next_line, self._silent = now + LOG_PERIOD_S, 0
        logger.warning(
            "vtoken: refused %s %s from %s: %d %s%s",
            scope.get("method", "stream"),
            _printable(scope["path"]),
            address_of(scope.get("client")),
            status,
            error.problem.field or error.problem.title,
            more,
        )


def _printable(path: str) -> str:
    return path[:128].encode("unicode_escape").decode()
