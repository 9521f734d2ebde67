"""The step being planned: its number and decisions, and what it adds to counters and events.

Independent of requests and configuration. Every invariant violation is reported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vtoken.base.errors import InvariantViolation
from vtoken.core.planning.gates import DEFERRALS
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.decisions import StepDecisions
from vtoken.core.runtime.events import EventLog
from vtoken.wire import Counters, EventKind, ReclamationCounters


class CurrentStep:
    """Step `number`, 0 before the first.

    `wanted_blocks`: those that the first waiting request lacked in the newest allocation, withheld
    ones included. `is_short_soon`: a shortage is near, so requests under `pressure` keep their
    signals. `num_reports`: how many steps have ended. `strict`: a violation stops the engine.
    `is_planned`: the engine allocates now, and the plan has not been handed over.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.number = 0
        self.num_reports = 0
        self.decisions = StepDecisions()
        self.wanted_blocks = 0
        self.is_short_soon = False
        self.is_planned = False
        self.events = EventLog()
        self.counters = Counters(
            reclamation=ReclamationCounters(deferrals=dict.fromkeys(DEFERRALS, 0))
        )

    def take_decisions(self) -> StepDecisions:
        """Take the decisions of the planned step; the next step starts without any."""
        decisions = self.decisions
        if not decisions.is_empty:
            self.decisions = StepDecisions()
        return decisions

    def note(self, kind: EventKind, summary: str, data: dict[str, Any]) -> None:
        """Add an event of this step."""
        self.events.add(self.number, kind, summary, data)

    def check_private(self, store: BlockStore, blocks: Sequence[int], content: str) -> None:
        """Blocks that get `content` must be private and unhashed (I4)."""
        foreign = store.first_not_writable(blocks)
        if foreign is not None:
            detail = f"block {foreign}, which gets {content}, is not private"
            self.violated(InvariantViolation("I4", detail))

    def violated(self, violation: InvariantViolation) -> None:
        """Count and report a broken invariant; in strict mode, raise it before the step ends."""
        self.counters.invariants.violations += 1
        data = {"invariant": violation.invariant, "detail": violation.detail}
        self.note("violation", str(violation), data)
        if self.strict:
            raise violation
