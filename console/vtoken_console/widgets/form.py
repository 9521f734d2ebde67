"""The settings form: a row a setting, in groups that can be folded.

A row has the setting's value. It has the ones that are set and in force only where they differ, and
a setting without effect is dim and says why. Details of the setting under the cursor are below the
rows (`setting_detail`). The screen reads `edits` and receives `Changed` for every change. A row is
a line: as an Input or a Select between labels, Textual's own widgets take about ten times as long
to open.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from vtoken_console.changes.fields import (
    EXPERIMENTS,
    Field,
    Path,
    parse_value,
    show_value,
    step_value,
)
from vtoken_console.changes.policies import kept_share
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import Line, Span, cut, merge
from vtoken_console.widgets.scroller import Scroller
from vtoken_console.widgets.setting_detail import detail_lines, num_lines

WORDS, NAME, VALUE = 27, 21, 15
NAMES_FROM = 90  # columns with room for the settings' own names
MIN_ROWS = 4  # of settings, however long the detail


class Form(Scroller["Field | str"]):
    """A row is a setting, or the name of a group."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "change(-1, False)", show=False),
        Binding("right,space", "change(1, False)", show=False),
        Binding("shift+left", "change(-1, True)", show=False),
        Binding("shift+right", "change(1, True)", show=False),
        Binding("backspace", "erase", show=False),
        Binding("delete", "reset", show=False),
    ]

    class Changed(Message):
        """The edits have changed."""

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, Form.Changed)

    def __init__(self, first: str, edits: Mapping[Path, Any], *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.fields: list[Field] = []
        self.edits = dict(edits)
        self._void: Mapping[str, str] = {}
        self._folded = {EXPERIMENTS}
        self._typed: tuple[Path, str] | None = None
        self._first = first
        self._detail: list[Line] = []

    def set_fields(self, fields: list[Field], void: Mapping[str, str]) -> None:
        """Replaces the settings; `void`: name -> why it has no effect.

        The cursor stays on its row, initially on the requested setting.
        """
        if not self.fields:
            first = next((f for f in fields if f.path[0] == self._first), fields[0])
            self._folded.discard(first.group)
            self.choose(first.path)
        self.fields, self._void = fields, void
        rows: list[Field | str] = []
        for group, members in groupby(fields, key=lambda field: field.group):
            rows.append(group)
            rows += [] if group in self._folded else members
        self.set_rows(rows)
        known = {field.path for field in fields}
        self.edits = {p: v for p, v in self.edits.items() if p in known}

    def key_of(self, row: Field | str) -> Path:
        return (row,) if isinstance(row, str) else row.path

    @property
    def field(self) -> Field | None:
        """The setting under the cursor; None on the name of a group."""
        return row if isinstance(row := self.chosen, Field) else None

    def value_of(self, field: Field) -> Any:
        return self.edits.get(field.path, field.desired)

    def cursor_moved(self) -> None:
        super().cursor_moved()
        self._typed = None

    @property
    def num_lines(self) -> int:
        """Lines needed for all rows and the longest detail."""
        return len(self.rows) + max(map(num_lines, self.fields), default=0)

    @property
    def page_rows(self) -> int:
        return max(1, self.content_size.height - len(self._detail))

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        field, self._detail = self.field, []
        if field is not None and view.model is not None:
            values = {f.name: self.value_of(f) for f in self.fields}
            self._detail = detail_lines(
                field,
                values[field.name],
                self._void.get(field.name, ""),
                kept_share(values, view.model.requests.values()),
                view.model,
                width,
                max(2, height - MIN_ROWS),
            )
        return super().build_lines(view, width, height)

    def build_foot(self, view: View, width: int) -> list[Line]:
        return self._detail

    def build_row(self, view: View, row: Field | str, width: int, *, selected: bool) -> Line:
        muted, faint = palette.MUTED_STYLE, palette.FAINT_STYLE
        mark = "›" if selected else " "
        if isinstance(row, str):
            size = sum(field.group == row for field in self.fields)
            folded = f"  {size} settings, space shows them" if row in self._folded else ""
            return merge([(f" {mark} {row}", palette.BOLD_STYLE), (folded, faint)])
        value, why = self.value_of(row), self._void.get(row.name, "")
        typed = self._typed
        editing = selected and typed is not None and typed[0] == row.path
        shown = typed[1] + "_" if editing and typed is not None else show_value(value)
        changed, waiting = value != row.desired, row.desired != row.effective
        ink = faint if why else palette.TEXT_STYLE
        style = palette.CURSOR_STYLE if selected else (palette.WARN_STYLE if changed else ink)
        others = [f"set {show_value(row.desired)}"] if changed else []
        others += [f"in force {show_value(row.effective)}"] if waiting else []
        spans: list[Span] = [
            (f" {mark}  {units.fit(row.words, WORDS)}", palette.BOLD_STYLE if selected else ink)
        ]
        if width >= NAMES_FROM:
            name = row.name if row.name != row.words else ""
            spans.append((units.fit(name, NAME), faint if why else muted))
        spans += [
            (units.fit(shown, VALUE), style),
            (", ".join(others), palette.WARN_STYLE),
            (why if why and not others else "", faint),
        ]
        return merge(cut(spans, width))

    def _set(self, field: Field, value: Any) -> None:
        if value == field.desired:
            self.edits.pop(field.path, None)
        else:
            self.edits[field.path] = value
        self.redraw()
        self.post_message(self.Changed())

    def action_change(self, by: int, coarse: bool) -> None:
        """Steps the setting, or folds or unfolds the group."""
        field = self.field
        if field is not None:
            self._typed = None
            self._set(field, step_value(field, self.value_of(field), by, coarse=coarse))
        elif isinstance(self.chosen, str):
            self._folded ^= {self.chosen}
            self.set_fields(self.fields, self._void)
            self.redraw()

    def action_reset(self) -> None:
        field = self.field
        if field is not None:
            self._typed = None
            self._set(field, field.desired)

    def action_erase(self) -> None:
        field = self.field
        if field is not None:
            typed = self._typed
            old = typed[1] if typed is not None else show_value(self.value_of(field))
            self._type(field, old[:-1])

    def on_key(self, event: events.Key) -> None:
        field = self.field
        char = event.character
        if field is None or char is None or not event.is_printable or char == " ":
            return
        event.stop()
        event.prevent_default()
        self._type(field, (self._typed[1] if self._typed is not None else "") + char)

    def on_paste(self, event: events.Paste) -> None:
        field, lines = self.field, event.text.split("\n")
        if field is not None and (text := "".join(filter(str.isprintable, lines[0])).strip()):
            event.stop()
            self._type(field, (self._typed[1] if self._typed is not None else "") + text)

    def _type(self, field: Field, text: str) -> None:
        self._typed = (field.path, text)
        self._set(field, parse_value(field, text))
