"""The help page: keys, colours and marks, glossary."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from vtoken_console.frame.keys import MOVES
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.heatmap.colouring import MODES, Mode
from vtoken_console.widgets.heatmap.text import legend
from vtoken_console.widgets.lines import EMPTY, Line, width_of
from vtoken_console.widgets.scroller import Scroller

WORDS = (
    ("live / dead", "a token that attention reads / one that was evicted"),
    ("F", "share of slots in used blocks that hold nothing live"),
    ("theta", "reclamation starts when F exceeds it and free blocks run low"),
    ("B", "most source blocks in one planning round"),
    ("bound", "blocks the live tokens would fill, packed: sum of ceil(live / block size)"),
    ("naive", "blocks held if nothing were reclaimed (naive-evict)"),
    ("cell", "upper part: mean live share of its used blocks; lower stripe: its worst block"),
)


class HelpLines(Scroller[Line]):
    """Scrollable text without a visible cursor."""

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        self.rows = page(view, width)
        return super().build_lines(view, width, height)

    def build_row(self, view: View, row: Line, width: int, *, selected: bool) -> Line:
        return row

    def action_page(self, by: int) -> None:
        self._go((self.top if by < 0 else self.top + self.page_rows - 1) + by * self.page_rows)

    def action_step(self, by: int) -> None:
        self._go((self.top if by < 0 else self.top + self.page_rows - 1) + by)


def page(view: View, width: int) -> list[Line]:
    """All lines of the help page."""
    head, key, text = palette.BOLD_STYLE, palette.KEY_STYLE, palette.TEXT_STYLE
    lines: list[Line] = []
    reason = view.read_only_reason
    for group in dict.fromkeys(k.group for k in view.keys):
        off = bool(reason) and group in ("Act", "Set", "Settings")
        note = f"   changes are off: {reason}" if off else ""
        lines.append(((f" {group}", head), (note, palette.WARN_STYLE)))
        for k in (k for k in view.keys if k.group == group):
            lines += _entry(((f"   {k.shown:<8}", key), (f"{k.label:<12}", text)), k.help, width)
        lines.append(EMPTY)
    lines.append(((" Move", head),))
    for keys, what in MOVES:
        lines += _entry(((f"   {keys:<26}", key),), what, width)
    lines += [EMPTY, ((" Heatmap", head),)]
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
        lines = HelpLines(id="help-lines")
        lines.border_title = "help: esc closes"
        lines.add_class("page")
        yield lines
