"""Looking up what became of a change whose answer was lost."""

from __future__ import annotations

from typing import Any

from vtoken import wire
from vtoken.client import sequences
from vtoken.client.errors import NotApplied, OutcomeUnknown, ProblemError
from vtoken.client.sequences import Steps


def looked_up(lost: OutcomeUnknown, timeout_s: float) -> Steps[Any]:
    """The answer that was lost. Raises the ProblemError of a refused change, NotApplied, and
    OutcomeUnknown if nobody tells within `timeout_s`.
    """
    change: wire.Change = yield from sequences.wait_change(lost.change_id, timeout_s=timeout_s)
    if change.problem is not None:
        raise ProblemError(change.problem)
    if change.state == "not_applied":
        raise NotApplied.of(f"the change {change.id} did not reach the engine: nothing was changed")
    answer = change.result or change.operation or change.forgotten or change.ended
    if answer is None:
        raise lost
    if isinstance(answer, wire.PatchResult | wire.Forgotten | wire.Ended):
        answer.notes.append(f"the answer was lost; change {change.id} was looked up: it is applied")
    return answer
