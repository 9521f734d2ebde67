"""Charts as data. A benchmark stores them in its JSON file; SVGs are drawn from that file alone.

Drawing needs matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

WIDTH, HEIGHT = 4.4, 3.3  # of a panel [inch]
COLUMNS = 3  # most panels in a row; four make two rows of two
MOST_TICKS = 9  # a logarithmic x axis with at most so many values labels each
FEW_DECADES = 100.0  # a logarithmic y axis of a smaller range also labels between powers of ten
SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "vtoken", "font.size": 8}


@dataclass
class Line:
    """One legend entry; `low` and `high` bound a band around `y`."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    reference: bool = False  # drawn dashed and black: a bound or a baseline


@dataclass
class Bars:
    """One legend entry with one bar per group of the panel; None leaves a gap."""

    name: str
    values: list[float | None]
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)


@dataclass
class Panel:
    """Lines over `x_label`, or bars in `groups`; never both."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    y_from_zero: bool = True


@dataclass
class Chart:
    """Panels side by side with one legend; drawn into `NAME.svg`, or `NAME-PART.svg`."""

    caption: str  # also the alt text of the image
    panels: list[Panel]
    part: str = ""


def file_names(name: str, charts: list[Chart]) -> dict[str, Chart]:
    """The SVG of each chart of the result `name`. Raises ValueError if two share a file."""
    found = {f"{name}-{c.part}.svg" if c.part else f"{name}.svg": c for c in charts}
    if len(found) != len(charts):
        raise ValueError(f"{name}: {len(charts)} charts, but only {len(found)} different parts")
    return found


def digest(chart: Chart) -> str:
    """SHA-256 of the chart's JSON. A chart that was read back from a file has the same digest."""
    same = msgspec.json.decode(msgspec.json.encode(chart), type=Chart)
    return sha256(msgspec.json.encode(same, order="sorted")).hexdigest()


def draw(chart: Chart, path: Path, *, source: str) -> None:
    """Draw `chart` into the SVG `path`, with `source` in its metadata.

    Equal charts give equal files. Raises ImportError without matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    count = len(chart.panels)
    columns = count if count <= COLUMNS else min(COLUMNS, -(-count // 2))
    rows = -(-count // columns)
    names: list[str] = []
    for panel in chart.panels:
        names += [line.name for line in panel.lines if not line.reference]
        names += [bars.name for bars in panel.bars]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    with rc_context(SETTINGS):
        legend_rows = -(-len(numbers) // columns)
        size = (WIDTH * columns, HEIGHT * rows + 0.2 * legend_rows)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        handles: dict[str, Any] = {}
        for axis, panel in zip(axes, chart.panels, strict=False):
            for line in panel.lines:
                handles.setdefault(line.name, _line(axis, line, numbers))
            for index, bars in enumerate(panel.bars):
                handles.setdefault(bars.name, _bars(axis, panel, index, numbers))
            _finish(axis, panel)
        for axis in axes[count:]:
            axis.set_visible(False)
        if len(handles) > 1:
            figure.legend(
                list(handles.values()), list(handles), loc="outside lower center", ncols=columns
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None, "Title": chart.caption, "Source": source}
        figure.savefig(path, format="svg", metadata=metadata)


def source_of(path: Path) -> str:
    """The `source` that `draw` stored in the SVG; "" if there is none."""
    text = path.read_text()
    return text.partition("<dc:source>")[2].partition("</dc:source>")[0]


def _line(axis: Any, line: Line, numbers: dict[str, int]) -> Any:
    if line.reference:
        if len(line.x) == 1:
            return axis.axhline(line.y[0], color="black", linestyle="--", linewidth=1)
        return axis.plot(line.x, line.y, color="black", linestyle="--", linewidth=1)[0]
    number = numbers[line.name]
    colour = f"C{number % 10}"
    style = ("-", "--", ":")[number // 10 % 3]  # colours repeat after ten
    marker = "osD^v<>PX*"[number % 10]
    if line.low and line.high:
        axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.12, linewidth=0)
    return axis.plot(
        line.x, line.y, style, marker=marker, markersize=3.5, color=colour, linewidth=1.3
    )[0]


def _bars(axis: Any, panel: Panel, index: int, numbers: dict[str, int]) -> Any:
    bars = panel.bars[index]
    width = 0.8 / len(panel.bars)
    found = [(i, value) for i, value in enumerate(bars.values) if value is not None]
    x = [i - 0.4 + (index + 0.5) * width for i, _ in found]
    y = [value for _, value in found]
    handle = axis.bar(x, y, width * 0.9, color=f"C{numbers[bars.name] % 10}")
    for (i, value), middle in zip(found, x, strict=True):
        low, high = (side[i] if i < len(side) else None for side in (bars.low, bars.high))
        if low is not None and high is not None:
            # Rounding may put the median of few repeats just outside its own range.
            spread = [[max(value - low, 0.0)], [max(high - value, 0.0)]]
            axis.errorbar(middle, value, spread, color="black", linewidth=0.8, capsize=2)
    return handle


def _finish(axis: Any, panel: Panel) -> None:
    axis.set_title(panel.title, fontsize=9)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(alpha=0.3, axis="y" if panel.bars else "both")
    axis.set_axisbelow(True)
    if panel.groups:
        axis.set_xticks(range(len(panel.groups)), panel.groups)
    if panel.x_scale == "log":
        axis.set_xscale("log")
        found = sorted({x for line in panel.lines for x in line.x})
        if len(found) <= MOST_TICKS:
            axis.set_xticks(found, [f"{x:,g}" for x in found])
            axis.set_xticks([], minor=True)
    if panel.y_scale == "log":
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        between = "25" if high / low < FEW_DECADES else ""
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        axis.yaxis.set_minor_formatter(lambda y, _: f"{y:,g}" if f"{y:e}"[0] in between else "")
    elif panel.y_from_zero and axis.dataLim.y0 >= 0:
        axis.set_ylim(bottom=0)
