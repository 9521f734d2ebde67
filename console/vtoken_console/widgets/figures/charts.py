"""Memory, waiting and latency over time.

Curves with a time axis, or bars if a curve does not fit or in ASCII. Marks on each axis show
configuration changes (▲) and trials that the engine reverted (▼) or kept (✓); the last line
describes the mark under the cursor, or the newest ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType

from vtoken.sentences import clock
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.style.breakpoints import WIDE_FROM
from vtoken_console.widgets.figures import plot
from vtoken_console.widgets.figures.bars import bars, nice_top
from vtoken_console.widgets.figures.gauge import used_share
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget, Span, cut, facts, merge, width_of

if TYPE_CHECKING:
    from vtoken_console.feed.series import F64, Marker, Series, Window

AXIS = 7  # columns of the scale on the left
GAP = 2
NUM_CHARTS = {False: 4, True: 6}  # by whether the panel is wide
MIN_WIDTH = 20  # columns of a chart
MIN_HEIGHT = 5  # lines of a chart
ASPECT = 3  # preferred columns per line of a chart
BRIDGED_S = 2.5  # the longest gap that a curve interpolates


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart's title, values and scale; `text` formats a scale value; `line`: the threshold;
    `other`: a second curve, where curves are drawn.

    The scale holds the values and the figure of the title, which may be higher than their newest
    column: a column is a mean.
    """

    title: list[Span]
    values: F64
    top: float
    text: Callable[[float], str]
    line: F64 | None = None
    other: F64 | None = None


def arrange(num: int, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of `num` charts: as many as fit, with a shape closest to ASPECT."""

    def rank(columns: int) -> tuple[int, float]:
        rows = max(1, min(-(-num // columns), height // MIN_HEIGHT))
        shape = width / columns / max(1, height / rows)
        return min(num, rows * columns), -abs(math.log(shape / ASPECT))

    fit = max(1, min(num, (width + GAP) // (MIN_WIDTH + GAP)))
    columns = max(range(1, fit + 1), key=rank)
    return max(1, min(-(-num // columns), height // MIN_HEIGHT)), columns


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
        """Moves the cursor to the previous or next mark."""
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

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        if view.model is None or view.model.status is None or view.series is None:
            return []
        span = view.series.span()
        name = f"last {span} s" if span < 60 else f"last {span // 60} min"
        self.set_titles(f"{name} · ▲ changed ▼ reverted")
        rows, columns = arrange(NUM_CHARTS[width >= WIDE_FROM], width, height - 1)
        each = (width - GAP * (columns - 1)) // columns
        tall = (height - 1) // rows
        is_curve = not view.ascii_only and tall >= plot.MIN_LINES + 3  # title, axis, its labels
        window = view.series.window(span, (each - AXIS) * (plot.DOTS_X if is_curve else 1))
        charts = make_charts(view, window)[: rows * columns]
        draw = self._curve if is_curve else self._bars
        blank = palette.TEXT_STYLE
        lines: list[Line] = []
        for first in range(0, len(charts), columns):
            drawn = [draw(chart, window, tall, view) for chart in charts[first : first + columns]]
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

    def _curve(self, chart: Chart, window: Window, height: int, view: View) -> list[Line]:
        """`height` lines: title, curve, time axis with marks, labels of the axis."""
        faint = palette.FAINT_STYLE
        num, columns = len(chart.values), len(chart.values) // plot.DOTS_X
        room = height - 3
        reach = math.ceil(BRIDGED_S * num / window.span_s)
        values = plot.bridged(chart.values, reach)
        other = None if chart.other is None else plot.bridged(chart.other, reach)
        markers = {x // plot.DOTS_X: marker for x, marker in window.markers.items()}
        body = plot.plot(values, room, chart.top, theta=chart.line, other=other)
        parts = 4 if room >= 12 else 2 if room >= 4 else 1
        scale = {
            room - 1 - int(n / parts * (room * plot.DOTS_Y - 1)) // plot.DOTS_Y: n / parts
            for n in range(1, parts + 1)
        }
        lines = [_title(chart, columns)]
        for y, line in enumerate(body):
            label = chart.text(scale[y] * chart.top) if y in scale else ""
            lines.append(merge([(label.rjust(AXIS - 1) + " ", faint), *line]))
        ticks = plot.time_axis(window.span_s, columns)
        lines.append(self._axis(columns, markers, {x for x, _ in ticks}))
        lines.append(((_labels(ticks, AXIS, AXIS + columns), faint),))
        return lines

    def _bars(self, chart: Chart, window: Window, height: int, view: View) -> list[Line]:
        """`height` lines: title, bars, time axis with marks."""
        faint = palette.FAINT_STYLE
        line = chart.line.tolist() if chart.line is not None else None
        body = bars(
            chart.values.tolist(),
            max(1, height - 2),
            chart.top,
            theta=line,
            ascii_only=view.ascii_only,
        )
        lines = [_title(chart, len(chart.values))]
        for n, line_ in enumerate(body):
            label = chart.text(chart.top) if n == 0 else ""
            lines.append(merge([(label.rjust(AXIS - 1) + " ", faint), *line_]))
        lines.append(self._axis(len(chart.values), window.markers, set()))
        return lines[:height]

    def _axis(self, columns: int, markers: dict[int, Marker], ticks: set[int]) -> Line:
        faint = palette.FAINT_STYLE
        chosen = self.chosen if self.has_focus else None
        spans: list[Span] = [("0".rjust(AXIS - 1) + " ", faint)]
        for x in range(columns):
            marker = markers.get(x)
            if marker is None:
                spans.append(("┴" if x in ticks else "─", faint))
            else:
                glyph, style = palette.MARKER_STYLES[marker.kind]
                spans.append((glyph, palette.CURSOR_STYLE if marker == chosen else style))
        return merge(spans)


def _title(chart: Chart, columns: int) -> Line:
    """The title above `columns` columns of values; its first two parts if it does not fit, the
    figure uncut.
    """
    room = AXIS + columns
    fits = width_of(chart.title) <= room
    title = [span for span in (chart.title if fits else chart.title[:2]) if span[0]]
    if width_of(title) > room:
        *label, (figure, style) = title
        title = [*cut(label, room - len(figure) - 1), (f" {figure}", style)]
    indent = max(0, min(AXIS, room - width_of(title)))
    return merge([(" " * indent, palette.FAINT_STYLE), *title])


def _labels(ticks: list[tuple[int, str]], indent: int, width: int) -> str:
    """Labels centred below their ticks, the first left-aligned, the last right-aligned."""
    text = ""
    for n, (x, label) in enumerate(ticks):
        back = 0 if n == 0 else len(label) - 1 if n == len(ticks) - 1 else len(label) // 2
        text = text.ljust(indent + x - back) + label
    return text[:width]


def make_charts(view: View, window: Window) -> list[Chart]:
    """All charts of what the server reports, the most important first."""
    assert view.model is not None
    assert view.series is not None
    status = view.model.status
    assert status is not None
    total = max(1, status.blocks.total)
    used = (1 - window.row("free_blocks") / total) * 100
    waiting, newest = window.row("waiting"), status.requests.waiting
    charts = [
        Chart(facts(("KV used ", f"{used_share(status.blocks):.0%}")), used, 100, _percent),
        Chart(
            facts(("waiting ", units.count(newest))),
            waiting,
            nice_top(_highest(max(4.0, newest), waiting)),
            _count,
        ),
    ]
    if status.pressure is not None:
        given = _rate(view.series, window, "given ", "given_per_s")
        parked = status.parking is not None
        charts.append(_with_restored(given, view.series, window) if parked else given)
    if status.slo is not None:
        share = status.slo.share
        met = "–" if share is None else f"{share:.0%}"
        charts.append(Chart(facts(("goodput ", met)), window.row("goodput") * 100, 100, _percent))
    return [
        *charts,
        _latency(view, window, "first token p95", "ttft_p95_ms"),
        _latency(view, window, "between tokens p95", "inter_token_p95_ms"),
        _rate(view.series, window, "", "tokens_per_s"),
    ]


def _rate(series: Series, window: Window, label: str, name: str) -> Chart:
    """Tokens a second."""
    values, rate = window.row(name), series.newest(name)
    title = [*facts((label, units.count(rate))), (" tok/s", palette.MUTED_STYLE)]
    return Chart(title, values, nice_top(_highest(max(1.0, rate), values)), _count)


def _with_restored(given: Chart, series: Series, window: Window) -> Chart:
    """`given` with the tokens that came back from host memory a second."""
    restored, rate = window.row("restored_per_s"), series.newest("restored_per_s")
    title = [*given.title, (f" restored {units.count(rate)}", palette.style(palette.PARKED))]
    top = nice_top(_highest(max(given.top, rate), restored))
    return replace(given, title=title, top=top, other=restored)


def _latency(view: View, window: Window, label: str, name: str) -> Chart:
    """A 95th percentile; the guard of a trial is its threshold."""
    assert view.model is not None
    status, config = view.model.status, view.model.config
    latency = status.latency if status else None
    inter_token = name == "inter_token_p95_ms"
    newest = (latency.inter_token if inter_token else latency.ttft).p95_ms if latency else None
    metric = f"latency_seconds{{kind={'inter_token' if inter_token else 'ttft'},quantile=0.95}}"
    guards = config.trial.guards if config and config.trial else []
    limits = [g.above * 1e3 for g in guards if g.metric == metric and g.above is not None]
    bound = min(limits, default=None)
    values = window.row(name)
    top = nice_top(_highest(max(bound or 1.0, newest or 0.0), values))
    over = bound is not None and newest is not None and newest > bound
    style = palette.WARN_STYLE if over else palette.BOLD_STYLE
    title = facts((f"{label} ", units.latency(newest, 0), style))
    if bound is not None:
        title.append((f" guard {units.latency(bound, 0)}", palette.THETA_STYLE))
    line = values * 0 + bound if bound is not None else None
    return Chart(title, values, top, _milliseconds, line)


def _highest(least: float, *rows: F64) -> float:
    """The highest value of `rows`, or `least`."""
    known: list[float] = [v for row in rows for v in row.tolist() if not math.isnan(v)]
    return max([least, *known])


def _count(value: float) -> str:
    return units.short_count(value).strip()


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _milliseconds(value: float) -> str:
    return f"{value / 1000:.3g}s" if value >= 1000 else f"{value:.3g}ms"


def marker_line(view: View, chosen: Marker | None, width: int) -> Line:
    """▲14 ana theta_f 0.4 → 0.25 14:02:09: the chosen mark, or as many of the newest as fit."""
    markers = view.series.markers if view.series is not None else []
    if not markers:
        status, since = view.model.status if view.model else None, "so far"
        if status is not None and status.config_revision > 1:
            since = "in this recording" if view.replay else "since this console connected"
        return ((f" no configuration change {since}", palette.FAINT_STYLE),)
    spans: list[Span] = []
    for marker in [chosen] if chosen is not None else reversed(markers):
        glyph, style = palette.MARKER_STYLES[marker.kind]
        one: list[Span] = [
            (f" {glyph}{marker.revision} ", style),
            (marker.actor, palette.TEXT_STYLE),
            (f" {marker.text} ", palette.MUTED_STYLE),
            (f"{clock(marker.ts)} ", palette.FAINT_STYLE),
        ]
        if spans and width_of(spans) + width_of(one) > width:
            break
        spans += one
    return merge(cut(spans, width))


def _pad(line: Line, width: int) -> list[Span]:
    line_ = cut(line, width)
    return [*line_, (" " * max(0, width - width_of(line_)), palette.TEXT_STYLE)]
