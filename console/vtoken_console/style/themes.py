"""Themes: the colour of each role of `palette`, dark or light, at each colour depth.

Lines are built with `palette`'s styles; `Theme.resolve` maps them to the theme's colours when the
line is drawn, so the theme can change at run time. Invariants, checked by tests:
1. text has a contrast of at least 4.5 on every background it is drawn on (WCAG 2, AA)
2. a theme only has colours that a terminal of its depth can show, so ramps stay monotonic
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from rich.color import Color, ColorSystem
from rich.style import Style
from textual.theme import Theme as TextualTheme

from vtoken_console.style import palette
from vtoken_console.style.ramp import Ramp, ink_on, mix, of_number, ramps

NAMES = ("dark", "light")
SCORE_SHADES = 5
SYSTEMS = {
    "truecolor": ColorSystem.TRUECOLOR,
    "256": ColorSystem.EIGHT_BIT,
    "16": ColorSystem.STANDARD,
}
DEPTHS = tuple(SYSTEMS)


class Role(NamedTuple):
    """A role's name in style sheets, its colour in the light theme, and those in the dark and the
    light theme of 16 colours, as Rich defines them.
    """

    name: str
    light: str
    dark_16: str
    light_16: str


ROLES: dict[str, Role] = {  # by their colour in the dark theme
    palette.BACKGROUND: Role("background", "#ffffff", "#000000", "#ffffff"),
    palette.BAR_BACKGROUND: Role("bar-background", "#eaeef2", "#000000", "#ffffff"),
    palette.NOTICE_BACKGROUND: Role("notice-background", "#e7ecf0", "#000000", "#ffffff"),
    palette.SELECTED_BACKGROUND: Role("selected-background", "#ddeaf9", "#0000aa", "#ffffff"),
    palette.CURSOR_BACKGROUND: Role("cursor-background", "#0550ae", "#0000aa", "#0000aa"),
    palette.BORDER: Role("border", "#c4ccd4", "#555555", "#aaaaaa"),
    palette.FOCUS: Role("focus", "#0969da", "#55ffff", "#0000aa"),
    palette.STRONG: Role("strong", "#010409", "#ffffff", "#000000"),
    palette.TEXT: Role("text", "#1f2328", "#ffffff", "#000000"),
    palette.MUTED: Role("muted", "#4b535c", "#aaaaaa", "#555555"),
    palette.FAINT: Role("faint", "#5f6872", "#aaaaaa", "#555555"),
    palette.KEY: Role("key", "#0a53b5", "#55ffff", "#0000aa"),
    palette.GOOD: Role("good", "#0b6647", "#55ff55", "#000000"),
    palette.WARN: Role("warn", "#8a4b00", "#ffff55", "#aa0000"),
    palette.BAD: Role("bad", "#b32410", "#ff5555", "#aa0000"),
    palette.DEAD: Role("dead", "#84551c", "#ffff55", "#555555"),
    palette.PARKED: Role("parked", "#6a55a8", "#00aaaa", "#aa00aa"),
    palette.BAR: Role("bar", "#4f86c6", "#55ffff", "#0000aa"),
    palette.THETA: Role("theta", "#7a35b8", "#ff55ff", "#aa00aa"),
}
# Of owners: 7 hues and 26 letters together distinguish 182 requests.
_HUES: dict[str, tuple[str, ...]] = {
    "dark": ("#4e9fd8", "#e0a03c", "#5fb87c", "#d96c8a", "#a58ae0", "#c9c254", "#4fc4c0"),
    "light": ("#1f6fb0", "#a85f00", "#1d7f4e", "#b23a5e", "#6b4fc0", "#77731a", "#0f7f80"),
}
# Of 256 colours: roles whose nearest colour has a wrong hue or too little contrast.
_ROLE_NUMBERS = {
    "dark": {palette.BAR_BACKGROUND: 234, palette.NOTICE_BACKGROUND: 234, palette.BORDER: 239},
    "light": {
        palette.BAR_BACKGROUND: 255,
        palette.NOTICE_BACKGROUND: 254,
        palette.BORDER: 250,
        palette.PARKED: 55,
        palette.THETA: 91,
    },
}
_SHADE_NUMBERS = {"dark": (233, 235, 237, 23, 24), "light": (231, 255, 189, 153, 117)}
_HUE_NUMBERS = {
    "dark": (74, 179, 72, 168, 140, 185, 80),
    "light": (25, 130, 29, 131, 62, 100, 30),
}


@dataclass(frozen=True, slots=True, eq=False)
class Theme:
    """`roles`: a role's colour in `palette` -> its colour in this theme. `hues` [7]: of owners."""

    name: str
    depth: str
    roles: Mapping[str, str]
    ramps: Mapping[str, Ramp]
    hues: tuple[str, ...]

    @property
    def full_name(self) -> str:
        return f"vtoken-{self.name}-{self.depth}"

    @property
    def dim(self) -> str:
        """The background of cells that a filter hides."""
        return self.roles[palette.BAR_BACKGROUND]

    def color(self, role: str) -> str:
        """The colour of a role in this theme."""
        return self.roles.get(role, role)

    def hue(self, number: int) -> str:
        """The colour of owner or kind `number`, from 1."""
        return self.hues[(number - 1) % len(self.hues)]

    def resolve(self, style: Style) -> Style:
        """`style` with the theme's colours."""
        ink, back = _hex(style.color), _hex(style.bgcolor)
        new_ink, new_back = self.color(ink), self.color(back)
        if back in self.roles and ink in ("#000000", "#ffffff"):
            new_ink = ink_on(new_back)
        return style + palette.style(new_ink or None, new_back or None)

    def for_textual(self) -> TextualTheme:
        """The roles as variables of Textual's style sheets: `$vt-border` and so on."""
        of = {role.name: self.color(dark) for dark, role in ROLES.items()}
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


@lru_cache(maxsize=512)
def nearest_number(color: str) -> str:
    """The nearest of 256 terminal colours."""
    number = Color.parse(color).downgrade(ColorSystem.EIGHT_BIT).number
    return of_number(number) if number is not None and number >= 16 else color


@lru_cache(maxsize=8)
def theme(name: str, depth: str) -> Theme:
    """The theme `name` (one of NAMES) at `depth` (one of DEPTHS)."""
    dark = name == "dark"
    roles = {own: own if dark else role.light for own, role in ROLES.items()}
    hues = _HUES[name]
    if depth == "256":
        numbers = _ROLE_NUMBERS[name]
        roles = {
            own: of_number(numbers[own]) if own in numbers else nearest_number(color)
            for own, color in roles.items()
        }
        hues = tuple(of_number(number) for number in _HUE_NUMBERS[name])
    elif depth == "16":
        roles = {own: role.dark_16 if dark else role.light_16 for own, role in ROLES.items()}
    found = ramps(dark=dark, numbered=depth == "256")
    if depth == "16":
        found["colour"] = found["shade"]
    return Theme(name, depth, roles, found, hues)


@lru_cache(maxsize=8)
def score_shades(current: Theme) -> tuple[str, ...]:
    """Backgrounds of text from the lowest to the highest score; empty for 16 colours."""
    if current.depth == "16":
        return ()
    if current.depth == "256":
        return tuple(of_number(number) for number in _SHADE_NUMBERS[current.name])
    ground, bar = current.color(palette.BACKGROUND), current.color(palette.BAR)
    return tuple(mix(ground, bar, n * 0.15) for n in range(SCORE_SHADES))


def guess_name(environ: Mapping[str, str]) -> str:
    """Dark or light by COLORFGBG, which some terminals set; dark by default."""
    value = environ.get("COLORFGBG", "")
    return "light" if value.rpartition(";")[2] in ("7", "15") else "dark"


def guess_depth(environ: Mapping[str, str]) -> str:
    """The terminal's colour depth by COLORTERM and TERM."""
    if environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        return "truecolor"
    kind = environ.get("TERM", "").strip().lower()
    if kind.endswith(("-direct", "-truecolor")) or kind in ("xterm-kitty", "alacritty"):
        return "truecolor"
    return "256" if "256color" in kind else "16"
