"""A panel of rows with a cursor, keys and mouse; only visible rows are built.

A subclass sets the rows and implements `build_row` and, optionally, head and foot lines. Textual's
DataTable keeps every cell of every row: too slow for rows that change with each frame, and for a
hundred thousand tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from textual import events

from vtoken_console.frame.view import View
from vtoken_console.widgets.cursor import CursorWidget
from vtoken_console.widgets.lines import EMPTY, Line

R = TypeVar("R")


class Scroller(CursorWidget, Generic[R]):
    HEAD = 0
    FOOT = 0

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.rows: Sequence[R] = ()
        self.cursor = 0
        self.top = 0
        self.range_text = ""  # the visible rows; empty if all are
        self.row_lines = 1  # lines of a row, where a subclass adds some to each
        self._key: Hashable = None  # of the row that the cursor stays on

    @property
    def chosen(self) -> R | None:
        """The row under the cursor."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    @property
    def picked(self) -> Hashable:
        """The key of the row to which the cursor was moved; None before."""
        return self._key

    def key_of(self, row: R) -> Hashable:
        """Identifies a row from frame to frame, where rows are replaced."""
        raise NotImplementedError

    def set_rows(self, rows: Sequence[R]) -> None:
        """Replaces the rows; the cursor stays on the row to which it was moved."""
        self.rows = rows
        if self._key is not None:
            found = (n for n, row in enumerate(rows) if self.key_of(row) == self._key)
            self.cursor = next(found, self.cursor)

    def choose(self, key: Hashable) -> None:
        """Moves the cursor to the row with this key, once there is one; None: it stays there."""
        self._key = key

    def build_row(self, view: View, row: R, width: int, *, selected: bool) -> Line:
        raise NotImplementedError

    def build_head(self, view: View, width: int) -> list[Line]:
        """Exactly HEAD lines."""
        return []

    def build_foot(self, view: View, width: int) -> list[Line]:
        """Exactly FOOT lines."""
        return []

    def cursor_moved(self) -> None:
        """Called after the cursor moved by key or mouse."""
        self.choose(self.key_of(self.rows[self.cursor]) if self.rows else None)

    @property
    def page_rows(self) -> int:
        return max(1, (self.content_size.height - self.HEAD - self.FOOT) // self.row_lines)

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        total = len(self.rows)
        room = self.page_rows
        self.cursor = max(0, min(self.cursor, total - 1))
        self.top = max(0, min(self.top, total - room))
        if self.cursor < self.top:
            self.top = self.cursor
        elif self.cursor >= self.top + room:
            self.top = self.cursor - room + 1
        shown = range(self.top, min(total, self.top + room))
        rows = [self.build_row(view, self.rows[n], width, selected=n == self.cursor) for n in shown]
        rows += [EMPTY] * (room - len(rows))
        text = f"{self.top + 1:,}–{self.top + len(shown):,} of {total:,}"
        self.range_text = text if total > room else ""
        self.set_titles(self._titles[0], self.range_text)
        return [*self.build_head(view, width), *rows, *self.build_foot(view, width)]

    def action_move(self, dx: int, dy: int) -> None:
        self._go(self.cursor + dy)

    def action_page(self, by: int) -> None:
        self._go(self.cursor + by * self.page_rows)

    def action_jump(self, to: int) -> None:
        self._go(to if to >= 0 else len(self.rows) - 1)

    def _go(self, row: int) -> None:
        self.cursor = max(0, min(row, len(self.rows) - 1))
        self.cursor_moved()
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        y = event.get_content_offset(self)
        if y is not None and self.HEAD <= y.y < self.HEAD + self.page_rows * self.row_lines:
            self._go(self.top + (y.y - self.HEAD) // self.row_lines)
            if event.chain == 2:
                self.double_clicked()

    def double_clicked(self) -> None:
        """Called after a double click on a row."""
