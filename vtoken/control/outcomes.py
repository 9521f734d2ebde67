"""What became of the newest calls that change something, for callers whose answer was lost.

An id names one call, and a lookup settles it: a call that arrives after it was told as not applied
is refused. So an outcome that was told once stays true.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from vtoken.base.errors import RefusedError
from vtoken.wire import Change, Ended, Forgotten, Operation, PatchResult, Reply, Restored

MAX_KEPT = 1000


class Outcomes:
    """The outcome of the newest MAX_KEPT changes, by the ids that their callers gave."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[str, bytes] = OrderedDict()  # encoded: documents change later
        self._not_applied: OrderedDict[str, None] = OrderedDict()  # told so; apart, as readers ask

    def require_new(self, change_id: str) -> None:
        """Raises RefusedError if a call with this id was handled, or told as not applied."""
        handled = change_id in self._outcomes
        if handled or change_id in self._not_applied:
            raise RefusedError(
                f"the change {change_id!r} was handled already; GET /vtoken/v1/changes/{change_id} "
                "tells what became of it"
                if handled
                else f"the change {change_id!r} was looked up before it came, and told as not "
                "applied: nothing was done",
                field="X-VToken-Change",
                value=change_id,
                bound="a new id for every change",
                status=409,
                title="Handled already",
            )

    def note(self, change_id: str, reply: Reply) -> None:
        """Keep the reply to a change."""
        change = Change(id=change_id, state="refused", problem=reply.problem)
        if reply.problem is None:
            change.state = "applied"
            change.result = reply.value if isinstance(reply.value, PatchResult) else None
            change.operation = reply.value if isinstance(reply.value, Operation) else None
            change.forgotten = reply.value if isinstance(reply.value, Forgotten) else None
            change.ended = reply.value if isinstance(reply.value, Ended) else None
            change.restored = reply.value if isinstance(reply.value, Restored) else None
        self._outcomes[change_id] = msgspec.msgpack.encode(change)
        if len(self._outcomes) > MAX_KEPT:
            self._outcomes.popitem(last=False)

    def get(self, change_id: str) -> Change:
        """The outcome of a change; `not_applied` if none with this id is kept, also from now on."""
        outcome = self._outcomes.get(change_id)
        if outcome is None:
            self._not_applied[change_id] = None
            if len(self._not_applied) > MAX_KEPT:
                self._not_applied.popitem(last=False)
            return Change(id=change_id, state="not_applied")
        return msgspec.msgpack.decode(outcome, type=Change)
