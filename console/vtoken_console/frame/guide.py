"""The guided first minute: what to look at and what to press, one step at a time.

A step ends when its condition holds in the model or on the screen, never by timeout. The file
`vtoken/guide-seen` in `$XDG_STATE_HOME` (or `~/.local/state`) marks the guide as seen or skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Facts:
    """The state that steps can wait for. `page`: "" (dashboard), fleet, settings, help, others."""

    page: str = ""
    cursor: int = 0
    edited: bool = False  # the settings page has an unapplied change
    revision: int = 0
    relocations: int = 0
    wasteful: bool = False  # F above theta_F
    on_trial: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """`text` has {key:id} for the key of an action; `first` in `done(first, now)`: at its start."""

    text: str
    done: Callable[[Facts, Facts], bool]


FLEET_STEP = Step(
    "A line is an engine; the sentence above names the one that stands out. Press "
    "{key:open-engine} to open the dashboard of the one under the cursor.",
    lambda _, now: now.page == "",
)
STEPS: tuple[Step, ...] = (
    Step(
        "A cell of the map is a few blocks of the KV cache: blue is full of live tokens, amber "
        "mostly dead, a dot is free. Move the cursor with the arrows.",
        lambda first, now: now.cursor != first.cursor,
    ),
    Step(
        "Evicted tokens leave holes: F above is the share of used slots with nothing "
        "live in them. Wait until it passes theta or a round runs.",
        lambda first, now: now.wasteful or now.relocations > first.relocations,
    ),
    Step(
        "Live tokens are moved together when F passes theta and free blocks run low. "
        "Press {key:theta-f} to set theta.",
        lambda _, now: now.page == "settings",
    ),
    Step(
        "Lower theta with the left arrow. Below is what the engine's own planner would evict, "
        "move and free. Nothing has happened yet.",
        lambda first, now: now.edited or now.revision > first.revision,
    ),
    Step(
        "Press {key:apply} to apply it: in force from the next step on, no request is interrupted.",
        lambda first, now: now.revision > first.revision,
    ),
    Step(
        "Close the page with esc and watch the map: tokens leave half-empty blocks, empty blocks "
        "return to the pool. {key:compact} if nothing moves.",
        lambda first, now: now.page == "" and now.relocations > first.relocations,
    ),
    Step(
        "Press {key:undo}: one key reverts the last change. The mark ▲ in the charts shows who "
        "changed what and when.",
        lambda first, now: now.revision > first.revision,
    ),
    Step(
        "Now on trial: {key:theta-f}, change theta, then {key:trial} and enter. The engine reverts "
        "such a change automatically unless you keep it.",
        lambda _, now: now.on_trial,
    ),
    Step(
        "The bar counts down. Close the page with esc, then {key:confirm} keeps the change and "
        "{key:undo} reverts it; or let the time run out.",
        lambda _, now: not now.on_trial,
    ),
    Step(
        "`vtoken record FILE` keeps what you see, `vtoken console --replay FILE` shows it again. "
        "{key:help} lists every key and ends this guide.",
        lambda _, now: now.page == "help",
    ),
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
        self._steps = STEPS
        self._first: Facts | None = None

    @property
    def finished(self) -> bool:
        return self.number > len(self._steps)

    @property
    def shown(self) -> Shown:
        """Of a guide that is not finished."""
        return Shown(self.number, len(self._steps), self._steps[self.number - 1].text)

    def update(self, now: Facts) -> None:
        """Advances if the current step's condition holds."""
        if self.finished:
            return
        if now.page == "fleet" and self.number == 1:
            self._steps = (FLEET_STEP, *STEPS)
        if self._first is None:
            self._first = now
        if self._steps[self.number - 1].done(self._first, now):
            self.number += 1
            self._first = now


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
