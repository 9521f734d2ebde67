"""The guided first minute: what to look at and what to press, one step at a time.

Knows no widget. A step is over when what it speaks of has happened, seen in the model or on the
screen, never because time has passed. That somebody has seen it, or skipped it, is remembered in
`vtoken/guide-seen` in `$XDG_STATE_HOME` (or `~/.local/state`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Facts:
    """What a step can wait for. `page`: "", settings, help or another page on top."""

    page: str = ""
    cursor: int = 0
    drafted: bool = False  # a value is changed on the settings page, not applied
    revision: int = 0
    relocations: int = 0
    wasteful: bool = False  # F above theta_F
    on_trial: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """One step as it is drawn; `keys` are marked in `text`."""

    number: int
    total: int
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """`text` with {key:id} for the key of an action; `done(first, now)`: since the step began."""

    text: str
    done: Callable[[Facts, Facts], bool]


STEPS: tuple[Step, ...] = (
    Step(
        "A cell of the map is a few blocks of the KV cache: blue is full of live tokens, amber "
        "mostly dead, a dot is free. Move the cursor with the arrows.",
        lambda first, now: now.cursor != first.cursor,
    ),
    Step(
        "The policy evicts tokens, holes grow: F above is the share of used slots with nothing "
        "live in them. Wait until it passes theta or a round runs.",
        lambda first, now: now.wasteful or now.relocations > first.relocations,
    ),
    Step(
        "Live tokens are moved together when F passes theta and free blocks run low. "
        "Press {key:theta-f} to set theta.",
        lambda _, now: now.page == "settings",
    ),
    Step(
        "Lower theta with the left arrow. Below stands what the engine's own planner would evict, "
        "move and free. Nothing has happened yet.",
        lambda first, now: now.drafted or now.revision > first.revision,
    ),
    Step(
        "Press {key:apply} to apply it: in force from the next step on, no request is interrupted.",
        lambda first, now: now.revision > first.revision,
    ),
    Step(
        "Close the page with esc and watch the map: tokens leave half-empty blocks, whole blocks "
        "go back to the pool. {key:compact} if nothing moves.",
        lambda first, now: now.page == "" and now.relocations > first.relocations,
    ),
    Step(
        "Press {key:undo}: one key takes the last change back. The mark ▲ in the charts says who "
        "changed what and when.",
        lambda first, now: now.revision > first.revision,
    ),
    Step(
        "Now with a net: {key:theta-f}, change theta, then {key:trial} and enter. Such a change is "
        "taken back by the engine itself unless you keep it.",
        lambda _, now: now.on_trial,
    ),
    Step(
        "The bar counts down. Close the page with esc, then {key:confirm} keeps the change and "
        "{key:undo} takes it back; or let the time run out.",
        lambda _, now: not now.on_trial,
    ),
    Step(
        "`vtoken record FILE` keeps what you see, `vtoken console --replay FILE` shows it again. "
        "{key:help} lists every key and ends this guide.",
        lambda _, now: now.page == "help",
    ),
)


class Guide:
    """Where in STEPS somebody is; `over` after the last one or a skip."""

    def __init__(self, key: Callable[[str], str]) -> None:
        self._key = key
        self._at = 0
        self._first: Facts | None = None

    @property
    def over(self) -> bool:
        return self._at >= len(STEPS)

    @property
    def shown(self) -> Shown | None:
        if self.over:
            return None
        text = STEPS[self._at].text
        while "{key:" in text:
            before, _, rest = text.partition("{key:")
            name, _, after = rest.partition("}")
            text = f"{before}{self._key(name)}{after}"
        return Shown(self._at + 1, len(STEPS), text)

    def look(self, now: Facts) -> None:
        """Goes on when what the step waits for has happened."""
        if self.over:
            return
        if self._first is None:
            self._first = now
        if STEPS[self._at].done(self._first, now):
            self._at += 1
            self._first = now

    def skip(self) -> None:
        self._at = len(STEPS)


def seen_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file whose presence says that the guide was seen."""
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "vtoken" / "guide-seen"


def remember(path: Path) -> str:
    """Notes that the guide was seen; answers what went wrong, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        return f"the guide will come again: {error}"
    return ""
