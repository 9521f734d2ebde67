"""The help page: keys, colours and marks, glossary."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.screen import ModalScreen

from vtoken_console.frame.keys import MOVES
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.heatmap.colouring import MODES, Mode
from vtoken_console.widgets.heatmap.text import legend
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget, width_of

WORDS = (
    ("live, dead", "a token that attention reads; one that was evicted"),
    ("parked", "a dead token with a copy in host memory: it comes back when memory is free"),
    ("floor", "the live tokens below which a request gives nothing"),
    ("kept", "live tokens of all: floor, what it can give (▓); parked (▒), dead (░)"),
    ("gave up", "tokens that died because memory was short (and how many are parked)"),
    ("needs", "blocks that must be free before a waiting request starts"),
    ("missing", "blocks that are needed and not free, with the reserve"),
    ("holes", "share of slots in used blocks that hold nothing live (F)"),
    ("compaction", "moves live tokens together; starts at theta_f, below N free blocks"),
    ("could be", "blocks that the live tokens would fill if packed"),
    ("cell", "upper part: mean live share of its used blocks; lower stripe: its worst block"),
)


class HelpLines(LinesWidget):
    """As many lines as the page has; they scroll in the container."""

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(page(self.view, width)) if self.view is not None else 1

    def show(self, view: View) -> None:
        is_first = self.view is None
        super().show(view)
        if is_first:
            self.refresh(layout=True)

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        return page(view, width)


def page(view: View, width: int) -> list[Line]:
    """All lines of the help page."""
    head, key, text = palette.BOLD_STYLE, palette.KEY_STYLE, palette.TEXT_STYLE
    lines: list[Line] = [
        ((" Keys in this colour change the server.", palette.CONTROL_STYLE),),
        EMPTY,
    ]
    reason = view.read_only_reason
    for group in dict.fromkeys(k.group for k in view.keys):
        off = bool(reason) and group in ("Act", "Set", "Settings")
        note = f"   changes are off: {reason}" if off else ""
        lines.append(((f" {group}", head), (note, palette.WARN_STYLE)))
        for k in (k for k in view.keys if k.group == group):
            style = palette.CONTROL_STYLE if k.control else key
            lines += _entry(((f"   {k.shown:<8}", style), (f"{k.label:<12}", text)), k.help, width)
        lines.append(EMPTY)
    lines.append(((" Move", head),))
    for keys, what in MOVES:
        lines += _entry(((f"   {keys:<26}", key),), what, width)
    lines += [EMPTY, ((" Map", head),)]
    lines += [
        (("  ", text), *legend(view, mode, width - 4, single=single))
        for mode, single in ((Mode.UTILISATION, False), *((mode, True) for mode in MODES))
    ]
    lines += [EMPTY, ((" Words", head),)]
    for word, what in WORDS:
        lines += _entry(((f"   {word:<12}", text),), what, width)
    return lines


def _entry(head: Line, what: str, width: int) -> list[Line]:
    """A term and its explanation, wrapped."""
    indent = width_of(head)
    first, *more = textwrap.wrap(what, max(20, width - indent)) or [""]
    muted = palette.MUTED_STYLE
    return [(*head, (first, muted)), *(((" " * indent + part, muted),) for part in more)]


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,enter", "dismiss", show=False)
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help-lines", classes="page") as frame:
            frame.border_title = "help: esc closes"
            frame.border_subtitle = "page up, page down"
            yield HelpLines()
