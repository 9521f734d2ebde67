"""The base of every panel: lines of styled spans, drawn by the Line API, refreshed by difference.

Knows no vToken data. A subclass builds its lines from a View; only lines that differ from the
ones on the screen are drawn again, and equal lines keep their Strip.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from vtoken_console.asciify import asciify
from vtoken_console.view import View

Span = tuple[str, Style]
Line = tuple[Span, ...]

EMPTY: Line = ()


def merge(spans: Iterable[Span]) -> Line:
    """Neighbouring spans of one style as one; empty ones dropped."""
    out: list[Span] = []
    for text, style in spans:
        if not text:
            continue
        if out and out[-1][1] is style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    return tuple(out)


def width_of(spans: Iterable[Span]) -> int:
    """Columns of a line, counting a character as one."""
    return sum(len(text) for text, _ in spans)


def spread(left: Iterable[Span], right: Iterable[Span], width: int, blank: Style) -> Line:
    """`left` and `right` pushed to the two ends of `width` columns; `left` is cut, `right` kept."""
    left, right = list(left), list(right)
    room = width - width_of(right)
    return merge([*cut(left, room), (" " * max(0, room - width_of(left)), blank), *right])


def cut(spans: Iterable[Span], width: int) -> list[Span]:
    """The first `width` columns of a line; a cut is marked."""
    spans = list(spans)
    if width_of(spans) <= width:
        return spans
    out: list[Span] = []
    room = max(0, width - 1)
    for text, style in spans:
        out.append((text[:room], style))
        room -= len(text)
        if room <= 0:
            out.append(("…" if width > 0 else "", style))
            break
    return out


def common_prefix(a: str, b: str) -> int:
    """How many leading characters two texts share."""
    shorter = min(len(a), len(b))
    return next((n for n in range(shorter) if a[n] != b[n]), shorter)


def changed_columns(old: Line, new: Line, width: int) -> tuple[int, int] | None:
    """The columns [first, last) in which two lines of a panel differ; None where they do not."""
    if old == new:
        return None
    first = 0
    for (a, style), (b, other) in zip(old, new, strict=False):
        if style != other:
            break
        same = common_prefix(a, b)
        first += same
        if same < len(a) or same < len(b):
            break
    if width_of(old) != width_of(new):
        return first, width
    last = width_of(new)
    for (a, style), (b, other) in zip(reversed(old), reversed(new), strict=False):
        if style != other:
            break
        same = common_prefix(a[::-1], b[::-1])
        last -= same
        if same < len(a) or same < len(b):
            break
    return first, max(last, first + 1)


class LinesWidget(Widget):
    """A widget whose content is `build_lines(view, width, height)`."""

    ALLOW_SELECT = False

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self.view: View | None = None
        self._lines: list[Line] = []
        self._titles = ("", "")
        self._strips: dict[int, Strip] = {}

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        """At most `height` lines of at most `width` columns."""
        raise NotImplementedError

    def show(self, view: View) -> None:
        """Takes the newest view and draws what changed."""
        self.view = view
        self.redraw()

    def redraw(self) -> None:
        """Builds the lines anew and refreshes those that differ."""
        width, height = self.content_size
        if self.view is None or width <= 0 or height <= 0:
            return
        lines = self.build_lines(self.view, width, height)[:height]
        if self.view.ascii_only:
            lines = [tuple((asciify(text), style) for text, style in line) for line in lines]
        old = self._lines
        self._lines = lines
        for y in range(max(len(lines), len(old))):
            before, after = (x[y] if y < len(x) else EMPTY for x in (old, lines))
            columns = changed_columns(before, after, width)
            if columns is not None:
                self._strips.pop(y, None)
                self.refresh(Region(columns[0], y, columns[1] - columns[0], 1))

    def entitle(self, title: str, subtitle: str = "") -> None:
        """Sets the titles in the border; a new one costs a drawing of the whole panel."""
        if self.view is not None and self.view.ascii_only:
            title, subtitle = asciify(title), asciify(subtitle)
        was, self._titles = self._titles, (title, subtitle)
        if was[0] != title:
            self.border_title = title
        if was[1] != subtitle:
            self.border_subtitle = subtitle

    def on_resize(self) -> None:
        self._strips.clear()
        self._lines = []
        self.redraw()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        strip = self._strips.get(y)
        if strip is None:
            line = self._lines[y] if y < len(self._lines) else EMPTY
            segments = [Segment(text, style) for text, style in line]
            strip = Strip(segments).adjust_cell_length(self.content_size.width)
            strip = strip.apply_style(self.rich_style)
            self._strips[y] = strip
        return strip
