"""Colour and glyph ramps: they map a share of live slots to one of LEVELS colours or glyphs.

Does not import numpy. Invariants:
1. level 0 means that no slot is live, level LEVELS - 1 that all are
2. relative luminance is strictly monotonic along every colour ramp, so that hue is redundant
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = 17
FREE_LEVEL = LEVELS  # the level of a cell that holds free blocks only
OTHER_LEVEL = LEVELS + 1  # the level of a cell with blocks of another group of layers, none of ours


@dataclass(frozen=True, slots=True)
class Ramp:
    """`colors` [LEVELS] as #rrggbb, or empty for a ramp of glyphs only; `glyphs` [LEVELS]."""

    colors: tuple[str, ...]
    glyphs: str
    free_color: str = "#161b22"
    other_color: str = "#41304f"


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def luminance(color: str) -> float:
    """WCAG relative luminance of #rrggbb, 0..1."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (v / 255 for v in _rgb(color))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(color: str) -> str:
    """Black or white, whichever has more contrast on `color`."""
    return "#000000" if luminance(color) > 0.18 else "#ffffff"


def mix(color: str, other: str, share: float) -> str:
    """`color` blended with `share` (0..1) of `other`."""
    mixed = (round(a + (b - a) * share) for a, b in zip(_rgb(color), _rgb(other), strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _interpolate(anchors: tuple[str, ...]) -> tuple[str, ...]:
    out = []
    for level in range(LEVELS):
        place = level / (LEVELS - 1) * (len(anchors) - 1)
        low = min(int(place), len(anchors) - 2)
        out.append(mix(anchors[low], anchors[low + 1], place - low))
    return tuple(out)


_SHADES = "·░░░░░░▒▒▒▒▒▓▓▓▓█"
_ASCII = ".:::---===+++***#"

# By whether the background is dark: waste is amber, full blocks are blue.
_ANCHORS = {
    True: ("#ffd166", "#f2a541", "#b98a6a", "#6f82a0", "#2f6fb5"),
    False: ("#8f2d00", "#b5642d", "#b98a72", "#a3a9b8", "#9ccbf5"),
}
# The same in a terminal's 256 colours: nearest in CIELAB, luminance strictly monotonic.
# fmt: off
_NUMBERS = {
    True: (228, 222, 221, 215, 214, 179, 209, 173, 138, 137, 245, 67, 244, 31, 60, 25, 24),
    False: (52, 88, 124, 94, 130, 131, 137, 173, 174, 247, 248, 249, 250, 251, 117, 153, 189),
}
# fmt: on
_OTHER_COLORS = {True: "#41304f", False: "#dccdea"}  # by whether the background is dark
_OTHER_NUMBERS = {True: 54, False: 183}
_CUBE = (0, 95, 135, 175, 215, 255)


def of_number(number: int) -> str:
    """The colour #rrggbb that Rich sends as number 16..255 to a terminal of 256 colours."""
    if number >= 232:
        grey = round((number - 231) / 25 * 255)
        return f"#{grey:02x}{grey:02x}{grey:02x}"
    red, rest = divmod(number - 16, 36)
    green, blue = divmod(rest, 6)
    return f"#{_CUBE[red]:02x}{_CUBE[green]:02x}{_CUBE[blue]:02x}"


def _colour_ramp(*, dark: bool, numbered: bool) -> Ramp:
    colors = (
        tuple(of_number(n) for n in _NUMBERS[dark]) if numbered else _interpolate(_ANCHORS[dark])
    )
    free = {(True, False): "#161b22", (True, True): of_number(234)}.get(
        (dark, numbered), "#f1f3f6" if not numbered else of_number(255)
    )
    other = of_number(_OTHER_NUMBERS[dark]) if numbered else _OTHER_COLORS[dark]
    return Ramp(colors, _SHADES, free, other)


def ramps(*, dark: bool = True, numbered: bool = False) -> dict[str, Ramp]:
    """Every ramp by name, for a dark or a light background; `numbered`: from 256 colours.

    "shade" and "ascii" are glyphs without colour.
    """
    colour = _colour_ramp(dark=dark, numbered=numbered)
    return {"colour": colour, "shade": Ramp((), _SHADES), "ascii": Ramp((), _ASCII)}
