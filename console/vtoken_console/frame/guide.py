"""The guided first minute: what to look at and what to press, one step at a time.

A step ends with what its user does, never by timeout or by what the server does. The file
`vtoken/guide-seen` in `$XDG_STATE_HOME` (or `~/.local/state`) marks the guide as seen or skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Facts:
    """What the user did. `page`: "" (dashboard), fleet, settings, request, help, others."""

    page: str = ""
    picked: Hashable = None  # the request to which the cursor was moved
    order: str = ""  # of the requests
    edited: bool = False  # the settings page has an unapplied change
    trials: int = 0  # that this console started
    changes: int = 0  # that this console made, or kept
    can_change: bool = True  # False: a recording, or a read-only console


@dataclass(frozen=True, slots=True)
class Step:
    """`text` has {key:id} for the key of an action; `first` in `done(first, now)`: at its start,
    but `first.page` is the page before.
    """

    text: str
    done: Callable[[Facts, Facts], bool]


FLEET_STEP = Step(
    "A line is an engine; the sentence above names the one that stands out. Press "
    "{key:open-engine} to open the dashboard of the one under the cursor.",
    lambda _, now: now.page == "",
)
LOOKING: tuple[Step, ...] = (
    Step(
        "When memory is short, the sentence on top says for whom, by how much, and what "
        "helps. Requests that wait come first: go down to one that runs.",
        lambda first, now: now.picked != first.picked,
    ),
    Step(
        "Requests that run give up tokens, down to their floor: see what each kept, and what "
        "it can still give. Press {key:sort} to sort by another.",
        lambda first, now: now.order != first.order,
    ),
    Step(
        "Press {key:open} on a request that gave: its words. Dimmed ones are parked and come "
        "back, struck ones do not. esc closes.",
        lambda first, now: first.page == "request" and now.page == "",
    ),
)
CHANGING: tuple[Step, ...] = (
    Step(
        "Press {key:floor} for the floor, the least that a request keeps, and left to "
        "lower it. Below is what it would bring. Nothing has happened yet.",
        lambda _, now: now.page == "settings" and now.edited,
    ),
    Step(
        "Press {key:trial} to try it: for minutes, and until a guard on a metric is crossed. Then "
        "the engine takes it back by itself. enter starts it.",
        lambda first, now: now.trials > first.trials,
    ),
    Step(
        "The bar counts down, and has the guard. {key:undo} takes the change back now, "
        "{key:confirm} keeps it. {key:help} lists every key.",
        lambda first, now: now.changes > first.changes,
    ),
)
ELSEWHERE = Step(
    "On a server that you may change, {key:floor} sets the floor and shows what it "
    "would bring, {key:trial} tries it, {key:undo} takes it back. {key:help} lists every key.",
    lambda _, now: now.page == "help",
)


@dataclass(frozen=True, slots=True)
class Shown:
    """The current step: its `number`, from 1, of `count`, and its text."""

    number: int
    count: int
    text: str


class Guide:
    """`number` of the current step, from 1; `finished` after the last one.

    If the fleet page is the start page, a step on it comes first.
    """

    def __init__(self) -> None:
        self.number = 1
        self._begin: tuple[Step, ...] = ()
        self._rest: tuple[Step, ...] = CHANGING
        self._first: Facts | None = None

    @property
    def _steps(self) -> tuple[Step, ...]:
        return (*self._begin, *LOOKING, *self._rest)

    @property
    def finished(self) -> bool:
        return self.number > len(self._steps)

    @property
    def shown(self) -> Shown:
        """Of a guide that is not finished."""
        return Shown(self.number, len(self._steps), self._steps[self.number - 1].text)

    def update(self, now: Facts) -> None:
        """Advances if the user did what the current step asks for."""
        if self.finished:
            return
        if now.page == "fleet" and self.number == 1:
            self._begin = (FLEET_STEP,)
        if self.number <= len(self._begin) + len(LOOKING):
            self._rest = CHANGING if now.can_change else (ELSEWHERE,)
        first = self._first or now
        if self._steps[self.number - 1].done(first, now):
            self.number += 1
            self._first = now
        elif self._first is None or now.page != first.page:
            self._first = replace(first, page=now.page)


def seen_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file whose presence marks the guide as seen."""
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "vtoken" / "guide-seen"


def mark_seen(path: Path) -> str:
    """Marks the guide as seen; returns an error message or an empty string."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        return f"the guide will come again: {error}"
    return ""
