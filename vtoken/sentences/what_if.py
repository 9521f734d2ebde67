"""What a change would do, as a difference: `can give 34 → 52 blocks`.

The same lines stand in the dry run of the command line and in the console's settings, before a
change and where it asks for a confirmation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vtoken.sentences import data_size, plural
from vtoken.wire import ConfigValues, void_settings

if TYPE_CHECKING:
    from vtoken.wire import PatchResult, WhatIf

MAX_LINES = 3
NO_DIFFERENCE = "no difference now"
OF_COMPACTION = frozenset(
    {
        "theta_f",
        "batch_size",
        "low_watermark_blocks",
        "headroom_blocks",
        "reclamation",
        "prefix_sharing",
        "experiment",
    }
)


class Line(NamedTuple):
    """One line of a difference. `is_loss`: undo does not bring back what it names."""

    text: str
    is_loss: bool = False


def difference(result: PatchResult, arrow: str = "→") -> list[Line]:
    """What the dry run `result` found, now and then, in at most three lines; one if it makes no
    difference, and none if no setting changes.

    What the change would not alter is left out. An older server does not say what happens without
    the change: its figures are those with it.
    """
    found, voids = result.what_if, _voids(result)
    if found is None or not result.changes:
        return []
    if voids.keys() == result.changes.keys():
        return [Line(why) for why in dict.fromkeys(voids.values())][:MAX_LINES]
    made = _Difference(found, arrow, parks=_parks(result))
    compacts = not OF_COMPACTION.isdisjoint(result.changes)
    lines = [Line(made.memory()), Line(made.room()), made.next_step(compacts=compacts)]
    return [line for line in lines if line.text] or [Line(NO_DIFFERENCE)]


def notes_beside(result: PatchResult) -> list[str]:
    """The notes of the dry run `result` that its difference does not say."""
    voids = _voids(result)
    told = tuple(voids.values()) if voids.keys() == result.changes.keys() else ()
    return [note for note in result.notes if not note.endswith(told)]


def _parks(result: PatchResult) -> bool:
    """Whether evicted tokens are copied to host memory, after the change."""
    after = _after(result)
    return after is not None and after.park_bytes > 0


def _voids(result: PatchResult) -> dict[str, str]:
    """The changed settings that would have no effect beside the others, and why."""
    after = _after(result)
    voids = {} if after is None else void_settings(after)
    return {name: why for name, why in voids.items() if name in result.changes}


def _after(result: PatchResult) -> ConfigValues | None:
    """The configuration with the change; None if an older server does not say."""
    if result.desired is None:
        return None
    changed = {name: new for name, (_, new) in result.changes.items()}
    return msgspec.convert(msgspec.to_builtins(result.desired) | changed, ConfigValues)


class _Difference:
    """The lines of one what-if; "" where the change alters nothing."""

    def __init__(self, found: WhatIf, arrow: str, *, parks: bool) -> None:
        """`parks`: tokens that are evicted have a copy in host memory."""
        self._found = found
        self._parks = parks
        self._less = found.without_change
        self._arrow = arrow
        self._runs = _runs(found)
        self._ran = self._less is None or _runs(self._less)

    def memory(self) -> str:
        """What running requests can give, and what is missing."""
        return _joined(
            self._changed("can give", "givable_blocks", "block"),
            self._changed("missing", "short_blocks", "block"),
        )

    def room(self) -> str:
        """Who could start: of those that wait for blocks, else of more like the running ones."""
        if waiting := self._found.waiting_requests:
            figure = self._figure("startable_requests")
            return f"{figure} of {waiting:,} waiting can start" if figure else ""
        return self._changed("room for", "more_requests", "more request", " like the running ones")

    def next_step(self, *, compacts: bool) -> Line:
        """What the next step would do, and why no compaction would run. `compacts`: the change is
        of a setting that compactions depend on.
        """
        found, less = self._found, self._less
        lost = found.evicted_tokens + found.waiting_tokens
        is_more = lost > (0 if less is None else less.evicted_tokens + less.waiting_tokens)
        is_loss = (is_more and not self._parks) or found.dropped_tokens > 0
        gone = ", into host memory" if self._parks else ", which cannot come back"
        gone = gone if is_more else ""
        moved = f" ({data_size(found.moved_bytes)})"
        parts = [
            self._changed("evicts", "evicted_tokens", "token", gone),
            self._changed("evicts", "waiting_tokens", "token", f" once scored{gone}"),
            self._changed("brings back", "restored_tokens", "parked token"),
            self._changed("loses", "dropped_tokens", "parked token", ", which cannot come back"),
            self._changed("moves", "moved_tokens", "token", moved) if self._runs else "",
            self._changed(
                "frees", "freed_blocks", "block", "" if self._runs else " if compacted by hand"
            ),
        ]
        if not self._runs and (compacts or self._ran):
            parts.append(f"no compaction: {_closed(found)[0]}")
        if found.deferred_reason and compacts:
            parts.append(f"deferred: {found.deferred_reason}")
        return Line(_joined(*parts), is_loss)

    def _changed(self, label: str, name: str, noun: str, rest: str = "") -> str:
        """`can give 34 → 52 blocks`; "" if the number is the same without the change."""
        figure, number = self._figure(name), getattr(self._found, name)
        return f"{label} {figure} {plural(number, noun)}{rest}" if figure else ""

    def _figure(self, name: str) -> str:
        """The number without and with the change, or only the latter if the former is not known,
        or is of a compaction that does not run; "" if both are the same.
        """
        number, without = getattr(self._found, name), getattr(self._less, name, None)
        if name in ("moved_tokens", "freed_blocks") and self._runs and not self._ran:
            without = None
        if number is None or number == (without or 0):
            return ""
        return f"{number:,}" if without is None else f"{without:,} {self._arrow} {number:,}"


def _runs(found: WhatIf) -> bool:
    """Whether a compaction would run by itself."""
    return not _closed(found)


def _closed(found: WhatIf) -> list[str]:
    """What keeps a compaction from running. The price alone keeps none: it opens other gates."""
    return [gate.detail for gate in found.gates if not gate.open and gate.name != "price"]


def _joined(*parts: str) -> str:
    return " · ".join(filter(None, parts))
