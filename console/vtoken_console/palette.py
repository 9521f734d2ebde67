"""The shared table of styles: every look on the screen, made once.

Knows no data. One meaning a colour; each is repeated by a glyph or a word where it is used.
"""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style

BORDER = "#30363d"
TEXT = "#d0d7de"
MUTED = "#8b949e"
FAINT = "#586069"
KEY = "#79c0ff"  # keys to press
GOOD = "#56d4b0"
WARN = "#ffb454"
BAD = "#ff7b54"
BAR = "#5b8fc9"  # an amount, in charts and bars
THETA = "#e3b3ff"  # the threshold, wherever it is drawn


@lru_cache(maxsize=4096)
def style(color: str | None = None, background: str | None = None, *, bold: bool = False) -> Style:
    """The style of these colours, the same object every time."""
    return Style(color=color, bgcolor=background, bold=bold or None)


TEXT_STYLE = style(TEXT)
MUTED_STYLE = style(MUTED)
FAINT_STYLE = style(FAINT)
BOLD_STYLE = style("#ffffff", bold=True)
KEY_STYLE = style(KEY, bold=True)
GOOD_STYLE = style(GOOD)
WARN_STYLE = style(WARN)
BAD_STYLE = style(BAD, bold=True)
THETA_STYLE = style(THETA)
CURSOR_STYLE = style("#ffffff", "#1f6feb", bold=True)
SELECTED_STYLE = style(TEXT, "#1c2a3f")

EVENT_LOOK: dict[str, tuple[str, Style]] = {
    "relocation": ("»", style("#79c0ff")),
    "config": ("▲", style(THETA)),
    "deferred": ("!", WARN_STYLE),
    "preemption": ("!", WARN_STYLE),
    "operation": ("o", style("#79c0ff")),
    "violation": ("X", BAD_STYLE),
    "server": ("·", MUTED_STYLE),
    "eviction": ("-", MUTED_STYLE),
    "reclaimed": ("+", GOOD_STYLE),
}
