"""The scenarios of the screenshots: keys to press, panel, terminal size.

A scenario starts from the dashboard with all panels. Its changes are undone afterwards, so
scenarios can run in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALL, NORMAL, LARGE = (80, 24), (120, 36), (200, 50)
HUGE = (220, 60)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`keys` are pressed with `focus` focused; `undo`: they begin a trial, and `u` ends it.

    `giver`: the cursor is on the request that gave most.

    `source`: "live", "guide" (guided first minute), "replay" of the flight recording, or "fleet":
    the fleet page of a server with several engines.
    """

    keys: tuple[str, ...] = ()
    size: tuple[int, int] = NORMAL
    focus: str = "#requests"
    giver: bool = False
    undo: bool = False
    source: str = "live"
    appearance: str = ""  # name of a theme or of a colour mode
    view: str = ""  # a panel alone
    settle_s: float = 1.2


LOWER_THETA = ("colon", *"theta_f", "enter", *("left",) * 5)
ON_TRIAL = ("f", "left", "left", "ctrl+t", "tab", *"500ms", "tab", "0", "enter")

SCENARIOS: dict[str, Scenario] = {
    "pool": Scenario(),
    "map": Scenario(view="pool"),
    "pool-state": Scenario(view="pool", appearance="state"),
    "pool-owner": Scenario(appearance="request"),
    # The demo's pool is small: only a small terminal has a region zoom level.
    "region": Scenario(("z", "z"), size=(64, 20)),
    "blocks": Scenario(("z", "z")),
    "slots": Scenario(("z",) * 4, settle_s=2.5),
    "text": Scenario(("enter",), giver=True, settle_s=3.0),
    "request": Scenario(("enter", "t"), giver=True, settle_s=2.5),
    "control": Scenario(LOWER_THETA, settle_s=4.0),
    "policy": Scenario(("P",)),
    "trial-terms": Scenario((*LOWER_THETA, "ctrl+t")),
    "trial": Scenario(ON_TRIAL, undo=True, settle_s=3.0),
    "confirm": Scenario(("colon", *"park_bytes", "enter", "0", "enter"), settle_s=2.0),
    "charts": Scenario(view="charts"),
    "figures": Scenario(view="numbers"),
    "events": Scenario(view="log"),
    "help": Scenario(("question_mark",)),
    "palette": Scenario(("colon", *"slow")),
    "light": Scenario(appearance="light"),
    "large": Scenario(size=LARGE),
    "small": Scenario(size=SMALL),
    "small-control": Scenario(LOWER_THETA, size=SMALL),
    "small-figures": Scenario(size=SMALL, view="numbers"),
    "guide": Scenario(source="guide", size=SMALL),
    "fleet": Scenario(source="fleet", focus="#fleet", size=HUGE),
    "small-fleet": Scenario(source="fleet", focus="#fleet", size=SMALL),
    # 40 s on, where something happens
    "replay": Scenario(("right_square_bracket",) * 8, source="replay"),
}
