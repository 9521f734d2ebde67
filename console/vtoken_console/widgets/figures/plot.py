"""Curves of braille dots, with a threshold line behind the curve.

W columns and H lines of characters are 2W x 4H dots.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, Span, merge

if TYPE_CHECKING:
    from vtoken_console.feed.series import F64

DOTS_X, DOTS_Y = 2, 4  # per character
BRAILLE = 0x2800
MIN_LINES = 3  # of a curve; with fewer, bars show more
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character's dots


def bridged(values: F64, reach: int) -> F64:
    """`values` with gaps of at most `reach` samples interpolated linearly."""
    import numpy as np

    known = np.flatnonzero(~np.isnan(values))
    out = values.copy()
    steps = np.diff(known)
    for at in np.flatnonzero((steps > 1) & (steps <= reach + 1)):
        left, right = known[at], known[at + 1]
        out[left:right] = np.linspace(values[left], values[right], right - left, endpoint=False)
    return out


def dots(values: F64, height: int, top: float) -> Any:
    """The curve through `values` [2W], scale 0..top, as braille bits of characters [H, W].

    Adjacent points are joined; NaN is a gap; values out of scale are clamped.
    """
    import numpy as np

    num_rows = height * DOTS_Y
    known = ~np.isnan(values)
    share = np.clip(np.where(known, values, 0) / top, 0, 1)
    at = np.rint(share * (num_rows - 1)).astype(int)
    low, high = at.copy(), at.copy()
    left, right = at[:-1], at[1:]
    middle = (left + right) // 2
    joined = known[:-1] & known[1:]
    rises, falls = joined & (left < right), joined & (left > right)
    # Each of two adjacent points extends half way: the lower one up to `middle`.
    high[:-1] = np.where(rises, np.maximum(high[:-1], middle), high[:-1])
    low[1:] = np.where(rises, np.minimum(low[1:], middle + 1), low[1:])
    low[:-1] = np.where(falls, np.minimum(low[:-1], middle + 1), low[:-1])
    high[1:] = np.where(falls, np.maximum(high[1:], middle), high[1:])
    row = np.arange(num_rows - 1, -1, -1)[:, None]
    lit = (row >= low) & (row <= high) & known
    bits = np.array(_BITS)[None, :, None, :]
    return (lit.reshape(height, DOTS_Y, -1, DOTS_X) * bits).sum(axis=(1, 3))


def plot(
    values: F64,
    height: int,
    top: float,
    *,
    theta: F64 | None = None,
    other: F64 | None = None,
) -> list[Line]:
    """The curve through `values` [2W] as `height` lines of W columns, scale 0..top.

    `theta` [2W] draws a line; the curve above it has the warning colour. `other` [2W]: a curve of
    parked tokens, behind the first.
    """
    curve = dots(values, height, top).tolist()
    behind = dots(values * math.nan if other is None else other, height, top).tolist()
    below, above = palette.style(palette.BAR), palette.style(palette.WARN)
    limits = [math.nan] * len(values) if theta is None else theta.tolist()
    amounts = values.tolist()
    lines: list[Line] = []
    for y in range(height):
        spans: list[Span] = []
        row = height - 1 - y  # counted from the axis
        for x, bits in enumerate(curve[y]):
            both = slice(x * DOTS_X, (x + 1) * DOTS_X)
            limit = limits[both][-1]
            at = -1 if math.isnan(limit) else min(height - 1, int(limit / top * height))
            if bits:
                pairs = zip(amounts[both], limits[both], strict=True)
                over = row >= at >= 0 and any(amount > limit for amount, limit in pairs)
                spans.append((chr(BRAILLE + bits), above if over else below))
            elif behind[y][x]:
                spans.append((chr(BRAILLE + behind[y][x]), palette.style(palette.PARKED)))
            elif row == at:
                spans.append(("─", palette.THETA_STYLE))
            else:
                spans.append((" ", below))
        lines.append(merge(spans))
    return lines


def time_axis(span_s: int, width: int) -> list[tuple[int, str]]:
    """Labels of a time axis of `width` columns that ends now: (column of the tick, text).

    As many labels of integer seconds or minutes as fit, at least the first and the last.
    """
    unit, per = ("min", 60) if span_s >= 120 else ("s", 1)
    total = span_s // per
    parts = next((n for n in (6, 5, 4, 3, 2) if total % n == 0 and width // n >= 12), 1)
    ticks = [(n * width // parts, f"-{total - n * total // parts} {unit}") for n in range(parts)]
    return [*ticks, (width - 1, "now")]
