"""The scenes of a tour through the console: what is pressed for each picture, and at which size.

Knows no server. A scene starts from the dashboard with all panels and what it changes is taken
back after it, so that pictures can be taken in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALL, NORMAL, LARGE = (80, 24), (120, 36), (200, 50)


@dataclass(frozen=True, slots=True)
class Scene:
    """`keys` are pressed with `focus` focused; `undo`: the scene changes the server.

    `source`: "live", "guide" for the first minute, "replay" of what the flight recorder holds.
    """

    keys: tuple[str, ...] = ()
    size: tuple[int, int] = NORMAL
    focus: str = "#pool"
    undo: bool = False
    source: str = "live"
    look: str = ""  # a theme or a colour mode, by name
    view: str = "all"
    settle_s: float = 1.2


LOWER_THETA = ("t", "left", "left", "left", "left", "left")
ON_TRIAL = ("t", "left", "left", "ctrl+t", "tab", *"500", "tab", "0", "enter")

SCENES: dict[str, Scene] = {
    "pool": Scene(),
    "pool-state": Scene(look="state"),
    "pool-owner": Scene(look="owner"),
    "pool-age": Scene(look="age"),
    "pool-churn": Scene(look="churn"),
    # The demo's pool is small: there is a region to zoom into only on a small terminal.
    "region": Scene(("z",), size=(64, 20)),
    "blocks": Scene(("z",)),
    "slots": Scene(("z", "z"), settle_s=2.5),
    "request": Scene(("enter",), focus="#requests", settle_s=2.5),
    "control": Scene(LOWER_THETA),
    "policy": Scene(("P",)),
    "trial-terms": Scene((*LOWER_THETA, "ctrl+t")),
    "trial": Scene((*ON_TRIAL, "escape"), undo=True, settle_s=3.0),
    "confirm": Scene(("m", *"128", "enter"), settle_s=2.0),
    "charts": Scene(view="charts"),
    "figures": Scene(view="figures"),
    "events": Scene(("e",), focus="#events", view="events"),
    "help": Scene(("question_mark",)),
    "palette": Scene(("colon",)),
    "light": Scene(look="light"),
    "large": Scene(size=LARGE),
    "small": Scene(size=SMALL),
    "small-control": Scene(LOWER_THETA, size=SMALL),
    "small-figures": Scene(size=SMALL, view="figures"),
    "guide": Scene(source="guide", size=SMALL),
    "replay": Scene(source="replay"),
}
