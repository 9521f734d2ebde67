"""Charts as data. A benchmark stores them in its JSON file; SVGs are drawn from that file alone.

Drawing needs matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

WIDTH, HEIGHT = 4.4, 3.3  # of a panel [inch]
COLUMNS = 3  # most panels in a row; four make two rows of two
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
class Panel:
    """Lines over `x_label`."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line] = field(default_factory=list)


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
            axis.set_title(panel.title, fontsize=9)
            axis.set_xlabel(panel.x_label)
            axis.set_ylabel(panel.y_label)
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)
            if axis.dataLim.y0 >= 0:
                axis.set_ylim(bottom=0)
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
