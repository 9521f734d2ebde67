"""The base of every panel: lines of styled spans, drawn with the Line API.

A subclass builds its lines from a View. Only lines that differ from the screen are redrawn; others
keep their Strip.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.style.themes import Theme

Span = tuple[str, Style]
Line = tuple[Span, ...]

EMPTY: Line = ()


def merge(spans: Iterable[Span]) -> Line:
    """Joins adjacent spans with the same style and drops empty spans."""
    out: list[Span] = []
    for text, style in spans:
        if not text:
            continue
        if out and out[-1][1] is style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    return tuple(out)


def facts(*named: tuple[str, str] | tuple[str, str, Style]) -> list[Span]:
    """Names, each followed by its value, which may have a style of its own."""
    spans: list[Span] = []
    for fact in named:
        style = fact[2] if len(fact) == 3 else palette.BOLD_STYLE
        spans += [(fact[0], palette.MUTED_STYLE), (fact[1], style)]
    return spans


def width_of(spans: Iterable[Span]) -> int:
    """Columns of a line, one per character."""
    return sum(len(text) for text, _ in spans)


def cells_of(spans: Iterable[Span]) -> int:
    """Columns of a line in the terminal's cell widths."""
    return sum(cell_len(text) for text, _ in spans)


def spread(left: Iterable[Span], right: Iterable[Span], width: int, blank: Style) -> Line:
    """`left` and `right` aligned to the ends of `width` columns; `left` is truncated to fit."""
    left, right = list(left), list(right)
    room = width - width_of(right)
    return merge([*cut(left, room), (" " * max(0, room - width_of(left)), blank), *right])


def cut(spans: Iterable[Span], width: int) -> list[Span]:
    """Truncates a line to `width` columns with an ellipsis."""
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


def wrap(spans: Iterable[Span], width: int, height: int) -> list[Line]:
    """Wraps a line at blanks into at most `height` lines; an ellipsis marks omitted text."""
    spans = list(spans)
    lines: list[Line] = []
    while width_of(spans) > width and len(lines) < height - 1:
        text = "".join(part for part, _ in spans)
        at = text.rfind(" ", 1, width + 1)
        at = at if text[:at].strip() else width
        lines.append(merge(cut(_columns_of(spans, 0, at), width)))
        spans = _columns_of(spans, at + (text[at] == " "), len(text))
        spans.insert(0, (" ", spans[0][1]))
    return [*lines, merge(cut(spans, width))]


def _columns_of(spans: list[Span], first: int, last: int) -> list[Span]:
    """Columns [first, last) of a line."""
    out: list[Span] = []
    at = 0
    for text, style in spans:
        out.append((text[max(0, first - at) : max(0, last - at)], style))
        at += len(text)
    return [span for span in out if span[0]]


class LinesWidget(Widget):
    """A widget whose content is `build_lines(view, width, height)`."""

    ALLOW_SELECT = False
    WIDE = False  # whether there may be characters of two columns, or of none

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        self._base: Style | None = None  # the widget's own colours; None: not cached
        self._strips: dict[int, Strip] = {}
        self._styled: dict[Style, Style] = {}  # a span's style -> with theme and base
        super().__init__(id=id, classes=classes)
        self.view: View | None = None
        self._lines: list[Line] = []
        self._titles = ("", "")
        self._theme: Theme | None = None

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        """At most `height` lines of at most `width` columns."""
        raise NotImplementedError

    def show(self, view: View) -> None:
        """Stores the newest view and draws the differences."""
        self.view = view
        self.redraw()

    def redraw(self) -> None:
        """Rebuilds the lines and refreshes those that differ."""
        width, height = self.content_size
        if self.view is None or width <= 0 or height <= 0:
            return
        lines = self.build_lines(self.view, width, height)[:height]
        old = self._lines
        self._lines = lines
        if self._theme is not self.view.theme:
            self._theme = self.view.theme
            self._base = None
            self._strips.clear()
            self.refresh()
            return
        for y in range(max(len(lines), len(old))):
            before, after = (x[y] if y < len(x) else EMPTY for x in (old, lines))
            if before != after:
                self._strips.pop(y, None)
                self.refresh(Region(0, y, width, 1))

    def set_titles(self, title: str, subtitle: str = "") -> None:
        """Sets the titles in the border."""
        was, self._titles = self._titles, (title, subtitle)
        if was[0] != title:
            self.border_title = title.replace("[", "\\[")
        if was[1] != subtitle:
            self.border_subtitle = subtitle.replace("[", "\\[")

    def watch_has_focus(self, _focus: bool) -> None:
        self.redraw()

    def on_resize(self) -> None:
        self._strips.clear()
        self._lines = []
        self.redraw()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        strip = self._strips.get(y)
        if strip is None:
            strip = self._strips[y] = self._strip(self._lines[y] if y < len(self._lines) else EMPTY)
        return strip

    def _strip(self, line: Line) -> Strip:
        base = self.rich_style if self._base is None else self._base
        if base is not self._base:
            self._base = base
            self._styled.clear()
        segments = []
        for text, style in line:
            styled = self._styled.get(style)
            if styled is None:
                resolved = style if self._theme is None else self._theme.resolve(style)
                styled = self._styled[style] = base + resolved
            segments.append(Segment(text, styled))
        used, width = cells_of(line) if self.WIDE else width_of(line), self.content_size.width
        if used > width:
            return Strip(segments, used).adjust_cell_length(width)
        if used < width:
            segments.append(Segment(" " * (width - used), base))
        return Strip(segments, width)

    def notify_style_update(self) -> None:
        # Another theme, class or focus may have changed the widget's colours.
        self._base = None
        self._strips.clear()
        super().notify_style_update()
