"""The settings form: a row per setting with new, desired and effective value and bounds.

Details of the setting under the cursor are below the rows (`setting_detail`). The screen reads
`edits` and receives `Changed` for every change. A row is a line: as an Input or a Select between
labels, Textual's own widgets take about ten times as long to open.
"""

from __future__ import annotations

from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from vtoken_console.changes.fields import Field, Path, parse_value, show_value, step_value
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import Line, Span, merge
from vtoken_console.widgets.scroller import Scroller
from vtoken_console.widgets.setting_detail import detail_lines, num_lines

LABEL, VALUE = 22, 16
BOUNDS = 3 + LABEL + VALUE + 2 + 2 * VALUE  # the first column of the bounds
MIN_ROWS = 3  # of settings, however long the detail


class Form(Scroller[Field]):
    HEAD = 1
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

    def __init__(self, first: str, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.edits: dict[Path, Any] = {}
        self._typed: tuple[Path, str] | None = None
        self._first = first
        self._detail: list[Line] = []

    def set_fields(self, fields: list[Field]) -> None:
        """Replaces the rows; the cursor stays on its setting, initially on the requested one."""
        if not self.rows:
            first = (field.path for field in fields if field.path[0] == self._first)
            self.choose(next(first, None))
        self.set_rows(fields)
        known = {field.path for field in fields}
        self.edits = {p: v for p, v in self.edits.items() if p in known}

    def key_of(self, row: Field) -> Path:
        return row.path

    def value_of(self, field: Field) -> Any:
        return self.edits.get(field.path, field.desired)

    def cursor_moved(self) -> None:
        super().cursor_moved()
        self._typed = None

    @property
    def num_lines(self) -> int:
        """Lines needed for all settings and the longest detail."""
        return self.HEAD + len(self.rows) + max(map(num_lines, self.rows), default=0)

    @property
    def page_rows(self) -> int:
        return max(1, self.content_size.height - self.HEAD - len(self._detail))

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        field, self._detail = self.chosen, []
        if field is not None and view.model is not None:
            budget = next((f for f in self.rows if f.path == ("budget_tokens",)), None)
            self._detail = detail_lines(
                field,
                self.value_of(field),
                self.value_of(budget) if budget is not None else None,
                view.model,
                width,
                max(2, height - self.HEAD - MIN_ROWS),
            )
        return super().build_lines(view, width, height)

    def build_foot(self, view: View, width: int) -> list[Line]:
        return self._detail

    def build_head(self, view: View, width: int) -> list[Line]:
        muted = palette.MUTED_STYLE
        names = f"{'desired':<{VALUE}}{'effective':<{VALUE}}"
        names += "bounds" if width >= BOUNDS + len("bounds") else ""
        return [((f"   {'setting':<{LABEL}}{'new':<{VALUE + 2}}{names}", muted),)]

    def build_row(self, view: View, field: Field, width: int, *, selected: bool) -> Line:
        value = self.value_of(field)
        typed = self._typed
        editing = selected and typed is not None and typed[0] == field.path
        shown = typed[1] + "_" if editing and typed is not None else show_value(value)
        changed = value != field.desired
        text, muted = palette.TEXT_STYLE, palette.MUTED_STYLE
        style = palette.CURSOR_STYLE if selected else (palette.WARN_STYLE if changed else text)
        mark = "›" if selected else " "
        waiting = field.desired != field.effective
        spans: list[Span] = [
            (f" {mark} {units.fit(field.label, LABEL)}", palette.BOLD_STYLE if selected else text),
            (units.fit(shown, VALUE), style),
            (" *" if changed else "  ", palette.WARN_STYLE),
            (units.fit(show_value(field.desired), VALUE - 1) + " ", muted),
            (
                units.fit(show_value(field.effective), VALUE - 1) + " ",
                palette.WARN_STYLE if waiting else muted,
            ),
            (self._bounds(field, width - BOUNDS), palette.FAINT_STYLE),
        ]
        return merge(spans)

    @staticmethod
    def _bounds(field: Field, room: int) -> str:
        """The bounds if they fit; the detail always has them."""
        count = f"{len(field.choices)} choices" if field.choices else ""
        return next((text for text in (field.bound_text, count) if len(text) <= room), "")

    def _set(self, field: Field, value: Any) -> None:
        if value == field.desired:
            self.edits.pop(field.path, None)
        else:
            self.edits[field.path] = value
        self.redraw()
        self.post_message(self.Changed())

    def action_change(self, by: int, coarse: bool) -> None:
        field = self.chosen
        if field is not None:
            self._typed = None
            self._set(field, step_value(field, self.value_of(field), by, coarse=coarse))

    def action_reset(self) -> None:
        field = self.chosen
        if field is not None:
            self._typed = None
            self._set(field, field.desired)

    def action_erase(self) -> None:
        field = self.chosen
        if field is not None:
            typed = self._typed
            old = typed[1] if typed is not None else show_value(self.value_of(field))
            self._type(field, old[:-1])

    def on_key(self, event: events.Key) -> None:
        field = self.chosen
        char = event.character
        if field is None or char is None or not event.is_printable or char == " ":
            return
        event.stop()
        event.prevent_default()
        self._type(field, (self._typed[1] if self._typed is not None else "") + char)

    def on_paste(self, event: events.Paste) -> None:
        field, lines = self.chosen, event.text.split("\n")
        if field is not None and (text := "".join(filter(str.isprintable, lines[0])).strip()):
            event.stop()
            self._type(field, (self._typed[1] if self._typed is not None else "") + text)

    def _type(self, field: Field, text: str) -> None:
        self._typed = (field.path, text)
        self._set(field, parse_value(field, text))
