"""The dialog for the terms of a trial: time limit and guards, which the engine enforces."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label

from vtoken_console.changes.trials import DEFAULT_MINUTES, LIMITS, parse_terms
from vtoken_console.style import palette, units
from vtoken_console.widgets.outcome import Outcome


class TrialScreen(ModalScreen[dict[str, Any] | None]):
    """Returns the terms as arguments of `patch_config`, or None if cancelled."""

    AUTO_FOCUS = "#minutes"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", show=False),
        Binding("enter", "start", show=False, priority=True),
        Binding("up", "app.focus_previous", show=False),
        Binding("down", "app.focus_next", show=False),
    ]

    def __init__(self, change: str, host: str, p95_ms: float | None, example: str) -> None:
        """`p95_ms`: between tokens, now; `example`: a guard to set here."""
        super().__init__()
        self._p95_ms, self._example = p95_ms, example
        self._text = Outcome(
            (f"On {host}: {change}", palette.BOLD_STYLE),
            (
                "An empty field is no limit. The engine reverts the change automatically, even if "
                "this console is closed. Evicted tokens come back only if they were parked.",
                palette.MUTED_STYLE,
            ),
            id="terms-said",
        )

    def compose(self) -> ComposeResult:
        now = f"now {units.latency(self._p95_ms, 0)}"
        with Vertical(id="trial", classes="page") as page:
            page.border_title = "apply on trial"
            page.border_subtitle = "tab next   enter start   esc cancel"
            yield from self._term("minutes", "unless kept within", "minutes", str(DEFAULT_MINUTES))
            for name, limit in LIMITS.items():
                shown, hint = (now, "800 ms") if limit.unit == "s" else (limit.unit, "0")
                yield from self._term(name, f"if {limit.label}", shown, hint=hint)
            yield from self._term("others", "if another metric crosses", hint=self._example)
            yield self._text

    def _term(
        self, name: str, label: str, unit: str = "", value: str = "", hint: str = ""
    ) -> ComposeResult:
        with Horizontal(classes="term"):
            yield Label(f" reverted {label}", classes="term-label")
            yield Input(value, placeholder=hint, id=name, compact=True, classes="term-value")
            yield Label(f" {unit}")

    def _typed(self, name: str) -> str:
        return self.query_one(f"#{name}", Input).value

    def action_start(self) -> None:
        limits = {name: self._typed(name) for name in LIMITS}
        try:
            self.dismiss(parse_terms(self._typed("minutes"), limits, self._typed("others")))
        except ValueError as error:
            self._text.set_paragraphs((f"{error}.", palette.BAD_STYLE))
