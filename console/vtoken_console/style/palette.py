"""The shared table of styles, each created once.

Each colour has one meaning, repeated by a glyph or a word where it is used. The colours here are
those of the dark theme and also identify the roles: `themes` maps each role to its colour in the
current theme when a line is drawn.
"""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style

Paragraph = tuple[str, Style]  # text to wrap, and its style

BACKGROUND = "#0d1117"
BAR_BACKGROUND = "#161b22"  # header, key bar
NOTICE_BACKGROUND = "#1c2128"
SELECTED_BACKGROUND = "#1c2a3f"
CURSOR_BACKGROUND = "#1f6feb"
BORDER = "#30363d"
FOCUS = "#58a6ff"  # the border of the focused panel
STRONG = "#f0f6fc"
TEXT = "#d0d7de"
MUTED = "#9ea7b3"
FAINT = "#818a95"
KEY = "#79c0ff"  # keys to press
GOOD = "#56d4b0"
WARN = "#ffb454"
BAD = "#ff7b54"
DEAD = "#c9975a"  # a dead token, as text
PARKED = "#9d90d0"  # a dead token that has a copy and can come back
BAR = "#5b8fc9"  # an amount, in charts and bars
THETA = "#e3b3ff"  # a threshold


@lru_cache(maxsize=4096)
def style(
    color: str | None = None,
    background: str | None = None,
    *,
    bold: bool = False,
    strike: bool = False,
    underline: bool = False,
) -> Style:
    """The style of these colours; the same arguments return the same object."""
    return Style(
        color=color,
        bgcolor=background,
        bold=bold or None,
        strike=strike or None,
        underline=underline or None,
    )


NO_STYLE = style()
TEXT_STYLE = style(TEXT)
INVERSE_STYLE = style(BACKGROUND, TEXT)
MUTED_STYLE = style(MUTED)
FAINT_STYLE = style(FAINT)
BOLD_STYLE = style(STRONG, bold=True)
KEY_STYLE = style(KEY, bold=True)
CONTROL_STYLE = style(WARN, bold=True)  # a key that changes the server
GOOD_STYLE = style(GOOD)
WARN_STYLE = style(WARN)
BAD_STYLE = style(BAD, bold=True)
KEY_INK = style(KEY)
THETA_STYLE = style(THETA)
CURSOR_STYLE = style("#ffffff", CURSOR_BACKGROUND, bold=True)
CURSOR_CELL_STYLE = style("#000000", STRONG, bold=True)  # a cell of a map
BLURRED_CELL_STYLE = style("#000000", MUTED, bold=True)
SELECTED_STYLE = style(TEXT, SELECTED_BACKGROUND)

EVENT_STYLES: dict[str, tuple[str, Style]] = {
    "relocation": ("»", KEY_INK),
    "config": ("▲", style(THETA)),
    "deferred": ("!", WARN_STYLE),
    "preemption": ("!", WARN_STYLE),
    "operation": ("o", KEY_INK),
    "violation": ("X", BAD_STYLE),
    "server": ("·", MUTED_STYLE),
    "canary": ("!", WARN_STYLE),
    "weights": ("!", WARN_STYLE),
    "eviction": ("-", MUTED_STYLE),
    "reclaimed": ("+", GOOD_STYLE),
    "restored": ("«", style(PARKED)),
    "parking": ("!", WARN_STYLE),
}
MARKER_STYLES: dict[str, tuple[str, Style]] = {  # of a change of the configuration
    "changed": ("▲", THETA_STYLE),
    "reverted": ("▼", WARN_STYLE),
    "kept": ("✓", GOOD_STYLE),
}
