"""Colour and glyph ramps: how a share of live slots becomes a look.

Knows no widget and no numpy. A ramp has LEVELS looks. Invariants:
1. level 0 means exactly nothing live, level LEVELS - 1 means exactly everything live
2. relative luminance is strictly monotonic along every colour ramp, so that no reader needs hue
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = 17


@dataclass(frozen=True, slots=True)
class Ramp:
    """`colors` [LEVELS] as #rrggbb, or empty for a ramp of glyphs only; `glyphs` [LEVELS]."""

    name: str
    summary: str
    colors: tuple[str, ...]
    glyphs: str
    free_color: str = "#161b22"


def level_of(share: float) -> int:
    """The level of a share 0..1; the two ends are kept for the two exact values."""
    if share <= 0:
        return 0
    if share >= 1:
        return LEVELS - 1
    return min(LEVELS - 2, max(1, round(share * (LEVELS - 1))))


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
    """Black or white, whichever reads better on `color`."""
    return "#000000" if luminance(color) > 0.18 else "#ffffff"


def _interpolate(anchors: tuple[str, ...]) -> tuple[str, ...]:
    out = []
    for level in range(LEVELS):
        place = level / (LEVELS - 1) * (len(anchors) - 1)
        low = min(int(place), len(anchors) - 2)
        a, b = _rgb(anchors[low]), _rgb(anchors[low + 1])
        mixed = (round(x + (y - x) * (place - low)) for x, y in zip(a, b, strict=True))
        out.append("#{:02x}{:02x}{:02x}".format(*mixed))
    return tuple(out)


_SHADES = "·░░░░░░▒▒▒▒▒▓▓▓▓█"
_ASCII = ".:::---===+++***#"

RAMPS: dict[str, Ramp] = {
    ramp.name: ramp
    for ramp in (
        Ramp(
            "amber-blue",
            "waste glows amber, full blocks are calm blue",
            _interpolate(("#ffd166", "#f2a541", "#b98a6a", "#6f82a0", "#2f6fb5")),
            _SHADES,
        ),
        Ramp(
            "cividis",
            "dark blue to yellow, made for colour-blind readers",
            _interpolate(("#123570", "#4a5170", "#7d7c78", "#b5a96e", "#fee838")),
            _SHADES,
        ),
        Ramp("grey", "light to dark grey", _interpolate(("#ffffff", "#4a4a4a")), _SHADES),
        Ramp("shade", "glyphs, no colour", (), _SHADES),
        Ramp("ascii", "ASCII glyphs, no colour", (), _ASCII),
    )
}
