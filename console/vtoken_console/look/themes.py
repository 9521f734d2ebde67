"""Which colour each role of `palette` has: dark or light, and how many colours the terminal shows.

Knows no widget. A line is made of `palette`'s styles; `Theme.resolve` gives each its colours when
the line is drawn, so that a theme can change while the console runs. Invariants, held by tests:
1. text on every background it is drawn on has a contrast of 4.5 or more (WCAG 2, AA)
2. the colours of a theme are those that a terminal of its depth shows, so ramps stay monotonic
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from rich.color import Color, ColorSystem
from rich.style import Style
from textual.theme import Theme as TextualTheme

from vtoken_console.look import palette
from vtoken_console.look.ramp import CHOICES, Ramp, ink_on, mix, of_number, ramps

NAMES = ("dark", "light")
SCORE_SHADES = 5
DEPTHS = ("truecolor", "256", "16")
SYSTEMS = {
    "truecolor": ColorSystem.TRUECOLOR,
    "256": ColorSystem.EIGHT_BIT,
    "16": ColorSystem.STANDARD,
}

_INKS = ("STRONG", "TEXT", "MUTED", "FAINT", "KEY", "GOOD", "WARN", "BAD", "DEAD", "THETA")
_LIGHT = {
    "BACKGROUND": "#ffffff",
    "BAR_BACKGROUND": "#eaeef2",
    "NOTICE_BACKGROUND": "#e7ecf0",
    "SELECTED_BACKGROUND": "#ddeaf9",
    "CURSOR_BACKGROUND": "#0550ae",
    "BORDER": "#c4ccd4",
    "FOCUS": "#0969da",
    "STRONG": "#010409",
    "TEXT": "#1f2328",
    "MUTED": "#4b535c",
    "FAINT": "#5f6872",
    "KEY": "#0a53b5",
    "GOOD": "#0b6647",
    "WARN": "#8a4b00",
    "BAD": "#b32410",
    "DEAD": "#84551c",
    "BAR": "#4f86c6",
    "THETA": "#7a35b8",
}
# The sixteen colours of a terminal, as Rich knows them.
_SIXTEEN = {
    "dark": {
        "BACKGROUND": "#000000",
        "BAR_BACKGROUND": "#000000",
        "NOTICE_BACKGROUND": "#000000",
        "SELECTED_BACKGROUND": "#0000aa",
        "CURSOR_BACKGROUND": "#0000aa",
        "BORDER": "#555555",
        "FOCUS": "#55ffff",
        "STRONG": "#ffffff",
        "TEXT": "#ffffff",
        "MUTED": "#aaaaaa",
        "FAINT": "#aaaaaa",
        "KEY": "#55ffff",
        "GOOD": "#55ff55",
        "WARN": "#ffff55",
        "BAD": "#ff5555",
        "DEAD": "#ffff55",
        "BAR": "#55ffff",
        "THETA": "#ff55ff",
    },
    "light": {
        "BACKGROUND": "#ffffff",
        "BAR_BACKGROUND": "#ffffff",
        "NOTICE_BACKGROUND": "#ffffff",
        "SELECTED_BACKGROUND": "#ffffff",
        "CURSOR_BACKGROUND": "#0000aa",
        "BORDER": "#aaaaaa",
        "FOCUS": "#0000aa",
        "STRONG": "#000000",
        "TEXT": "#000000",
        "MUTED": "#555555",
        "FAINT": "#555555",
        "KEY": "#0000aa",
        "GOOD": "#000000",
        "WARN": "#aa0000",
        "BAD": "#aa0000",
        "DEAD": "#555555",
        "BAR": "#0000aa",
        "THETA": "#aa00aa",
    },
}
_HUES: dict[
    str, tuple[str, ...]
] = {  # of owners; seven, so that hue and letter (26) together tell 182 requests apart
    "dark": ("#4e9fd8", "#e0a03c", "#5fb87c", "#d96c8a", "#a58ae0", "#c9c254", "#4fc4c0"),
    "light": ("#1f6fb0", "#a85f00", "#1d7f4e", "#b23a5e", "#6b4fc0", "#77731a", "#0f7f80"),
}
# Of 256: roles whose nearest colour has a hue or a contrast that it must not have.
_ROLE_NUMBERS = {
    "dark": {"BAR_BACKGROUND": 234, "NOTICE_BACKGROUND": 234, "BORDER": 239},
    "light": {"BAR_BACKGROUND": 255, "NOTICE_BACKGROUND": 254, "BORDER": 250, "THETA": 91},
}
_SHADE_NUMBERS = {"dark": (233, 235, 237, 23, 24), "light": (231, 255, 189, 153, 117)}
_HUE_NUMBERS = {
    "dark": (74, 179, 72, 168, 140, 185, 80),
    "light": (25, 130, 29, 131, 62, 100, 30),
}


@dataclass(frozen=True, slots=True, eq=False)
class Theme:
    """`roles`: palette's colour of a role -> the colour here. `hues` [7]: of owners."""

    name: str
    depth: str
    roles: Mapping[str, str]
    ramps: Mapping[str, Ramp]
    hues: tuple[str, ...]
    _known: dict[Style, Style] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        return f"vtoken-{self.name}-{self.depth}"

    @property
    def dim(self) -> str:
        """The background of what a filter hides."""
        return self.roles[palette.BAR_BACKGROUND]

    def color(self, role: str) -> str:
        """The colour of one of palette's colours."""
        return self.roles.get(role, role)

    def resolve(self, style: Style) -> Style:
        """`style` with the colours that its roles have here."""
        known = self._known.get(style)
        if known is None:
            ink = _hex(style.color)
            back = _hex(style.bgcolor)
            new_ink, new_back = self.color(ink), self.color(back)
            if back in self.roles and ink in ("#000000", "#ffffff"):
                new_ink = ink_on(new_back)
            known = style + palette.style(new_ink or None, new_back or None)
            self._known[style] = known
        return known

    def for_textual(self) -> TextualTheme:
        """The same roles as variables of Textual's style sheets: `$vt-border` and so on."""
        of = {name.lower().replace("_", "-"): self.color(role) for name, role in _roles().items()}
        return TextualTheme(
            name=self.full_name,
            primary=of["key"],
            secondary=of["bar"],
            accent=of["focus"],
            warning=of["warn"],
            error=of["bad"],
            success=of["good"],
            foreground=of["text"],
            background=of["background"],
            surface=of["background"],
            panel=of["bar-background"],
            dark=self.name == "dark",
            variables={f"vt-{name}": color for name, color in of.items()},
        )


def _hex(color: Color | None) -> str:
    return color.triplet.hex if color is not None and color.triplet is not None else ""


def _roles() -> dict[str, str]:
    """Role -> its colour in `palette`."""
    return {name: getattr(palette, name) for name in _LIGHT}


@lru_cache(maxsize=512)
def nearest_number(color: str) -> str:
    """`color` as one that a terminal of 256 colours shows."""
    number = Color.parse(color).downgrade(ColorSystem.EIGHT_BIT).number
    return of_number(number) if number is not None and number >= 16 else color


@lru_cache(maxsize=8)
def theme(name: str, depth: str) -> Theme:
    """One of NAMES in one of DEPTHS."""
    dark = name == "dark"
    roles = {role: role if dark else _LIGHT[key] for key, role in _roles().items()}
    hues = _HUES[name]
    if depth == "256":
        chosen = {getattr(palette, key): n for key, n in _ROLE_NUMBERS[name].items()}
        roles = {
            role: of_number(chosen[role]) if role in chosen else nearest_number(color)
            for role, color in roles.items()
        }
        hues = tuple(of_number(number) for number in _HUE_NUMBERS[name])
    elif depth == "16":
        roles = {role: _SIXTEEN[name][key] for key, role in _roles().items()}
    found = ramps(dark=dark, numbered=depth == "256")
    if depth == "16":
        found = dict.fromkeys(found, found["shade"]) | {"ascii": found["ascii"]}
    return Theme(name, depth, roles, found, hues)


@lru_cache(maxsize=8)
def score_shades(current: Theme) -> tuple[str, ...]:
    """Backgrounds of text from the lowest score to the highest; none where sixteen colours are all.

    Text stays readable on all of them.
    """
    if current.depth == "16":
        return ()
    if current.depth == "256":
        return tuple(of_number(number) for number in _SHADE_NUMBERS[current.name])
    ground, bar = current.color(palette.BACKGROUND), current.color(palette.BAR)
    return tuple(mix(ground, bar, n * 0.1) for n in range(SCORE_SHADES))


def choices(current: Theme) -> tuple[str, ...]:
    """The ramps of utilisation that differ in this theme."""
    return ("shade", "ascii") if current.depth == "16" else CHOICES


def guess_name(environ: Mapping[str, str] | None = None) -> str:
    """Dark or light by COLORFGBG, which some terminals set; dark when nothing is known."""
    said = (os.environ if environ is None else environ).get("COLORFGBG", "")
    return "light" if said.rpartition(";")[2] in ("7", "15") else "dark"


def guess_depth(environ: Mapping[str, str] | None = None) -> str:
    """How many colours the terminal shows, by COLORTERM and TERM."""
    said = os.environ if environ is None else environ
    if said.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        return "truecolor"
    kind = said.get("TERM", "").strip().lower()
    if kind.endswith(("-direct", "-truecolor")) or kind in ("xterm-kitty", "alacritty"):
        return "truecolor"
    return "256" if "256color" in kind else "16"
