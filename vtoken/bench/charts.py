"""Charts as data: a benchmark leaves them in its JSON file, and the SVG is drawn from that alone.

Knows no benchmark. Drawing needs matplotlib, the extra `plots` of vToken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Line:
    """One name in the legend; `low` and `high` are the spread around `y`, drawn as a band."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    reference: bool = False  # dashed and black: a bound, or what the others are compared with


@dataclass
class Bars:
    """One name in the legend, a bar in each of the panel's groups; None leaves the place empty."""

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

    caption: str  # also the text for whoever cannot see the picture
    panels: list[Panel]
    part: str = ""
