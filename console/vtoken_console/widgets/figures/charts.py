"""Memory and latency over time: F, free blocks, inter-token latency, tokens a second, TTFT.

Each axis carries a mark where somebody changed the configuration (▲) or the engine took a trial
back (▼) or kept it (✓); the last line names the mark under the cursor, or the newest ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType

from vtoken_console.frame.view import View
from vtoken_console.look import palette, units
from vtoken_console.widgets.figures.bars import bars, nice_top
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget, Span, cut, merge, width_of

if TYPE_CHECKING:
    from vtoken_console.feed.series import Marker, Window

AXIS = 6  # columns of the scale on the left
GAP = 2
LEAST = 20  # columns of the narrowest chart
LEAST_ROWS = 5  # lines of the lowest one


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart's title, values and scale; `line`: a threshold, drawn across."""

    title: list[Span]
    values: list[float]
    top: float
    top_text: str
    line: list[float] | None = None


class Charts(LinesWidget, can_focus=True):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", show=False),
        Binding("right", "step(1)", show=False),
        Binding("end", "newest", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.chosen: Marker | None = None

    def action_step(self, by: int) -> None:
        """The cursor goes to the mark before or after."""
        series = self.view.series if self.view is not None else None
        markers = series.markers if series is not None else []
        if not markers:
            return
        at = markers.index(self.chosen) if self.chosen in markers else len(markers) - (by > 0)
        self.chosen = markers[max(0, min(len(markers) - 1, at + by))]
        self.redraw()

    def action_newest(self) -> None:
        self.chosen = None
        self.redraw()

    def watch_has_focus(self, _focus: bool) -> None:
        self.redraw()

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        if view.model is None or view.model.status is None or view.series is None:
            return []
        span = view.series.span()
        name = f"last {span} s" if span < 60 else f"last {span // 60} min"
        self.entitle(f"{name} · ▲ changed ▼ taken back")
        fit = max(1, (width + GAP) // (LEAST + GAP))
        rows = max(1, min(-(-5 // fit), (height - 1) // LEAST_ROWS))
        columns = min(fit, -(-5 // rows))
        each = (width - GAP * (columns - 1)) // columns
        window = view.series.window(span, each - AXIS)
        charts = _charts(view, window)[: rows * columns]
        tall = (height - 1) // rows
        blank = palette.TEXT_STYLE
        lines: list[Line] = []
        for first in range(0, len(charts), columns):
            drawn = [
                self._draw(chart, window, tall, view) for chart in charts[first : first + columns]
            ]
            lines += [
                merge(
                    span
                    for n, one in enumerate(drawn)
                    for span in ((" " * (GAP if n else 0), blank), *_pad(one[y], each))
                )
                for y in range(tall)
            ]
        lines += [EMPTY] * (height - 1 - len(lines))
        return [*lines, marker_line(view, self.chosen if self.has_focus else None, width)]

    def _draw(self, chart: Chart, window: Window, height: int, view: View) -> list[Line]:
        """Title line, bars, and a time axis with a mark at each change: `height` lines."""
        faint = palette.FAINT_STYLE
        room = max(1, height - 2)
        body = bars(chart.values, room, chart.top, theta=chart.line, ascii_only=view.ascii_only)
        chosen = self.chosen if self.has_focus else None
        axis: list[Span] = []
        for x in range(len(chart.values)):
            marker = window.markers.get(x)
            if marker is None:
                axis.append(("─", faint))
            else:
                glyph, look = _glyph(marker)
                axis.append((glyph, palette.CURSOR_STYLE if marker == chosen else look))
        if width_of(chart.title) > AXIS + len(chart.values):
            chart = replace(chart, title=chart.title[:2])
        indent = max(0, min(AXIS, AXIS + len(chart.values) - width_of(chart.title)))
        lines: list[Line] = [merge([(" " * indent, faint), *chart.title])]
        for n, line in enumerate(body):
            label = chart.top_text if n == 0 else ""
            lines.append(merge([(label.rjust(AXIS - 1) + " ", faint), *line]))
        lines.append(merge([("0".rjust(AXIS - 1) + " ", faint), *axis]))
        return lines[:height]


def _charts(view: View, window: Window) -> list[Chart]:
    """All charts, the most telling first."""
    assert view.model is not None
    assert view.series is not None
    status = view.model.status
    assert status is not None
    muted, bold = palette.MUTED_STYLE, palette.BOLD_STYLE
    fragmentation, total = status.fragmentation, status.blocks.total
    f, theta = window.row("f").tolist(), window.row("theta_f").tolist()
    top_f = min(1.0, nice_top(max([0.1, *_known(f), *_known(theta)]) * 1.05))
    word = "theta" if view.ascii_only else "θ"
    rates = window.row("tokens_per_s").tolist()
    top_rate = nice_top(max([1.0, *_known(rates)]))
    return [
        Chart(
            [
                ("F ", muted),
                (f"{fragmentation.f:.2f}", bold),
                (f"  {word} ", muted),
                (f"{fragmentation.theta_f:.2f}", palette.THETA_STYLE),
            ],
            f,
            top_f,
            f"{top_f:.2f}",
            theta,
        ),
        Chart(
            [
                ("free ", muted),
                (units.count(status.blocks.free, len(units.count(total))), bold),
            ],
            window.row("free_blocks").tolist(),
            total,
            units.short_count(total).strip(),
        ),
        _latency(view, window, "ITL p95", "inter_token_p95_ms"),
        Chart(
            [(units.count(view.series.newest("tokens_per_s"), 6), bold), (" tok/s", muted)],
            rates,
            top_rate,
            units.short_count(top_rate).strip(),
        ),
        _latency(view, window, "TTFT p95", "ttft_p95_ms"),
    ]


def _latency(view: View, window: Window, label: str, name: str) -> Chart:
    """A 95th percentile; the guard of a trial is its threshold."""
    assert view.model is not None
    status, config = view.model.status, view.model.config
    latency = status.latency if status else None
    inter_token = name == "inter_token_p95_ms"
    newest = (latency.inter_token if inter_token else latency.ttft).p95_ms if latency else None
    trial = config.trial if config else None
    bound = trial.guard.inter_token_p95_ms if trial and trial.guard and inter_token else None
    values = window.row(name).tolist()
    top = nice_top(max([1.0, *_known(values), bound or 0.0]))
    over = bound is not None and newest is not None and newest > bound
    title: list[Span] = [
        (f"{label} ", palette.MUTED_STYLE),
        (units.latency(newest), palette.WARN_STYLE if over else palette.BOLD_STYLE),
    ]
    if bound is not None:
        title.append((f" guard {units.latency(bound, 0)}", palette.THETA_STYLE))
    line = [bound] * len(values) if bound is not None else None
    text = f"{top / 1000:g}s" if top >= 1000 else f"{top:g}ms"
    return Chart(title, values, top, text, line)


def _known(values: list[float]) -> list[float]:
    return [v for v in values if not math.isnan(v)]


def _glyph(marker: Marker) -> Span:
    return {
        "changed": ("▲", palette.THETA_STYLE),
        "reverted": ("▼", palette.WARN_STYLE),
        "kept": ("✓", palette.GOOD_STYLE),
    }[marker.kind]


def marker_line(view: View, chosen: Marker | None, width: int) -> Line:
    """▲14 ana theta_f 0.4 → 0.25 14:02:09: the chosen mark alone, or the newest, as many as fit."""
    markers = view.series.markers if view.series is not None else []
    if not markers:
        return ((" no change of the configuration was seen so far", palette.FAINT_STYLE),)
    spans: list[Span] = []
    for marker in [chosen] if chosen is not None else reversed(markers):
        glyph, look = _glyph(marker)
        one: list[Span] = [
            (f" {glyph}{marker.revision} ", look),
            (marker.actor, palette.TEXT_STYLE),
            (f" {marker.text} ", palette.MUTED_STYLE),
            (f"{units.clock(marker.ts)} ", palette.FAINT_STYLE),
        ]
        if spans and width_of(spans) + width_of(one) > width:
            break
        spans += one
    return merge(cut(spans, width))


def _pad(line: Line, width: int) -> list[Span]:
    line_ = cut(line, width)
    return [*line_, (" " * max(0, width - width_of(line_)), palette.TEXT_STYLE)]
