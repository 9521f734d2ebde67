"""F against theta_F, free blocks and tokens per second over time; marks where config changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.style import Style

from vtoken_console import palette, units
from vtoken_console.view import View
from vtoken_console.widgets.lines import Line, LinesWidget, Span, merge

if TYPE_CHECKING:
    from vtoken_console.series import Window

EIGHTHS = " ▁▂▃▄▅▆▇█"
AXIS = 6  # columns of the scale on the left
GAP = 2


def nice_top(value: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is not below `value`."""
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
    """Columns of eighths, `height` lines, scale 0..top; NaN is blank. `theta` draws a line.

    What stands above theta is drawn in the warning colour.
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
            look = above if over else below
            if marks[x] == y:
                back = (palette.WARN if over else palette.BAR) if part >= 5 else None
                ink = "#000000" if back and over else palette.THETA
                spans.append(("─", palette.style(ink, back)))
            elif ascii_only:
                spans.append(("#" if part >= 4 else " ", look))
            elif part == 8:  # a background, so that no seam shows between two lines
                spans.append((" ", palette.style(None, palette.WARN if over else palette.BAR)))
            else:
                spans.append((EIGHTHS[part], look))
        lines.append(merge(spans))
    return lines


class Charts(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        if view.model is None or view.model.status is None or view.series is None:
            return []
        status = view.model.status
        span = view.series.span()
        name = f"last {span} s" if span < 60 else f"last {span // 60} min"
        self.entitle(f"{name} · ▲ configuration changed")
        num = 3 if width >= 66 else (2 if width >= 44 else 1)
        each = (width - GAP * (num - 1)) // num
        window = view.series.window(span, each - AXIS)
        f, theta = window.row("f").tolist(), window.row("theta_f").tolist()
        known = [v for v in (*f, *theta) if not math.isnan(v)]
        top_f = min(1.0, nice_top(max([0.1, *known]) * 1.05))
        word = "theta" if view.ascii_only else "θ"
        muted, bold = palette.MUTED_STYLE, palette.BOLD_STYLE
        rate = view.series.newest("tokens_per_s")
        fragmentation = status.fragmentation
        charts = [
            self._chart(
                [
                    ("F ", muted),
                    (f"{fragmentation.f:.2f}", bold),
                    (f"  {word} ", muted),
                    (f"{fragmentation.theta_f:.2f}", palette.THETA_STYLE),
                ],
                f,
                window,
                height,
                top_f,
                f"{top_f:.2f}",
                view,
                theta,
            )
        ]
        total = status.blocks.total
        charts.append(
            self._chart(
                [
                    ("free ", muted),
                    (units.count(status.blocks.free, len(units.count(total))), bold),
                    (" blocks", muted),
                ],
                window.row("free_blocks").tolist(),
                window,
                height,
                total,
                units.short_count(total).strip(),
                view,
            )
        )
        values = window.row("tokens_per_s").tolist()
        top = nice_top(max([1.0, *(v for v in values if not math.isnan(v))]))
        charts.append(
            self._chart(
                [(units.count(rate, 6), bold), (" tok/s", muted)],
                values,
                window,
                height,
                top,
                units.short_count(top).strip(),
                view,
            )
        )
        blank = palette.TEXT_STYLE
        return [
            merge(
                span
                for n, chart in enumerate(charts[:num])
                for span in ((" " * (GAP if n else 0), blank), *_pad(chart[y], each, blank))
            )
            for y in range(height)
        ]

    def _chart(
        self,
        title: list[Span],
        values: list[float],
        window: Window,
        height: int,
        top: float,
        top_text: str,
        view: View,
        theta: list[float] | None = None,
    ) -> list[Line]:
        """Title line, bars, and a time axis with a mark at each change: `height` lines."""
        faint = palette.FAINT_STYLE
        room = max(1, height - 2)
        body = bars(values, room, top, theta=theta, ascii_only=view.ascii_only)
        axis = merge(
            ("▲", palette.THETA_STYLE) if x in window.markers else ("─", faint)
            for x in range(len(values))
        )
        lines: list[Line] = [merge([(" " * AXIS, faint), *title])]
        for n, line in enumerate(body):
            label = top_text if n == 0 else ""
            lines.append(merge([(label.rjust(AXIS - 1) + " ", faint), *line]))
        lines.append(merge([("0".rjust(AXIS - 1) + " ", faint), *axis]))
        return lines[:height]


def _pad(line: Line, width: int, blank: Style) -> Line:
    used = sum(len(text) for text, _ in line)
    return (*line, (" " * max(0, width - used), blank))
