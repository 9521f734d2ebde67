"""What must be said unasked: what became of changes, and which part of the server fails.

A change may be taken back by the engine, kept, overtaken by others, or not in force yet.

Knows no widget. `look` is given the newest model and answers what must be said. Invariants:
1. an event is told once; those from before this console came are not told
2. while a call of this console is under way nothing is told: its answer says whose the event is
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtoken_console.look.values import change_text

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken.stream.reducer import StreamState

PATIENCE_S = 3.0  # an accepted change is in force sooner, unless the engine stands still


@dataclass(frozen=True, slots=True)
class Report:
    """One thing to say; `grave` ones stay until they were seen."""

    text: str
    grave: bool


class Watch:
    """Follows this console's own changes through the events of everybody."""

    def __init__(self) -> None:
        self.calls = 0  # of this console, under way
        self._epoch = ""
        self._since = 0.0
        self._told_seq = 0
        self._mine: dict[int, set[str]] = {}  # revision -> fields
        self._pending: tuple[int, float] | None = None  # revision, monotonic time of its answer

    def own(self, result: wire.PatchResult, monotonic: float) -> None:
        """A change of this console was accepted."""
        self._mine[result.revision] = set(result.changes)
        self._pending = (result.revision, monotonic)

    def look(self, model: StreamState, monotonic: float) -> list[Report]:
        """What came of changes since the last look."""
        if model.hello is None or self.calls:
            return []
        if model.epoch != self._epoch:
            self._epoch, self._since, self._told_seq = model.epoch, model.hello.ts, 0
            self._mine, self._pending = {}, None
        told: list[Report] = []
        for event in reversed(model.events):
            if event.seq <= self._told_seq or event.ts < self._since:
                break
            if event.kind == "config":
                said = self._tell(event)
                if said is not None:
                    told.append(said)
        if model.events:
            self._told_seq = max(self._told_seq, model.events[-1].seq)
        late = self._late(model, monotonic)
        return [*reversed(told), *([late] if late is not None else [])]

    def _tell(self, event: wire.Event) -> Report | None:
        data = event.data
        revision = int(data.get("revision") or 0)
        changes = change_text(data.get("changes") or {})
        if "reverted" in data:
            why = data.get("reason") or "its trial ended"
            text = (
                f"Taken back: revision {data['reverted']}, {why}. Now {changes} (rev {revision})."
            )
            return Report(text, grave=True)
        if "kept" in data:
            return Report(f"Kept: revision {data['kept']}, {data.get('reason', '')}.", grave=False)
        if revision in self._mine:
            return None
        fields = set(data.get("changes") or {})
        hit = [mine for mine, own in self._mine.items() if own & fields]
        overtaken = data.get("overtaken")
        if overtaken in self._mine:
            text = f"Overtaken: no step ran with your revision {overtaken}; "
        elif hit:
            text = f"Overtaken: your revision {max(hit)} no longer holds; "
        else:
            return None
        for mine in hit:
            self._mine[mine] -= fields
        return Report(f"{text}{data.get('actor')} set {changes} (rev {revision}).", grave=True)

    def _late(self, model: StreamState, monotonic: float) -> Report | None:
        """Says once that an accepted change is not in force."""
        if self._pending is None or model.config is None:
            return None
        revision, since = self._pending
        effective = model.config.effective_revision
        if model.config.revision < revision or monotonic - since < PATIENCE_S:
            return None
        self._pending = None
        if effective == 0 or effective >= revision or model.config.revision > revision:
            return None
        text = (
            f"Deferred: revision {revision} is accepted and not in force; the engine's newest step "
            f"ran with revision {effective}."
        )
        return Report(text, grave=True)


class HealthWatch:
    """Follows the parts of the server: says once that one fails, and once that it works again."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    def look(self, health: list[wire.Health]) -> list[Report]:
        """What came of the parts since the last look."""
        before, self._failing = self._failing, {part.name for part in health if not part.ok}
        told = []
        for part in health:
            if not part.ok and part.name not in before:
                told.append(Report(f"The server's {part.name} FAILS: {part.detail}", grave=True))
            elif part.ok and part.name in before:
                told.append(Report(f"The server's {part.name} works again.", grave=False))
        return told
