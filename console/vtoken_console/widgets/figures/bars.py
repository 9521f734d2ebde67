"""Bar charts of block characters in eighths, with a threshold line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vtoken_console.style import palette
from vtoken_console.widgets.lines import Line, Span, merge

EIGHTHS = " ▁▂▃▄▅▆▇█"


def nice_top(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= value * (1 - 1e-9))


def bars(
    values: Sequence[float],
    height: int,
    top: float,
    *,
    theta: Sequence[float] | None = None,
    ascii_only: bool = False,
) -> list[Line]:
    """Bars of `values`, `height` lines, scale 0..top; NaN is blank.

    `theta` draws a line; the part of a bar above it has the warning colour.
    """
    below, above = palette.style(palette.BAR), palette.style(palette.WARN)
    eighths = [0 if math.isnan(v) else min(height * 8, round(v / top * height * 8)) for v in values]
    marks = [-1] * len(values)
    if theta is not None:
        marks = [-1 if math.isnan(t) else min(height - 1, int(t / top * height)) for t in theta]
    lines: list[Line] = []
    for y in range(height - 1, -1, -1):
        spans: list[Span] = []
        for x, filled in enumerate(eighths):
            part = max(0, min(8, filled - y * 8))
            over = theta is not None and y >= marks[x] >= 0 and values[x] > theta[x]
            style = above if over else below
            if marks[x] == y:
                back = (palette.WARN if over else palette.BAR) if part >= 5 else None
                ink = "#000000" if back and over else palette.THETA
                spans.append(("─", palette.style(ink, back)))
            elif ascii_only:
                spans.append(("#" if part >= 4 else " ", style))
            elif part == 8:  # a background, so that there is no seam between lines
                spans.append((" ", palette.style(None, palette.WARN if over else palette.BAR)))
            else:
                spans.append((EIGHTHS[part], style))
        lines.append(merge(spans))
    return lines
