"""The dialog for the terms of a trial: time limit and guards, which the engine enforces."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label

from vtoken_console.changes.trials import DEFAULT_MINUTES, parse_terms
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import terminal_text
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

    def __init__(self, change: str, host: str, p95_ms: float | None) -> None:
        super().__init__()
        self._p95_ms = p95_ms
        self._text = Outcome(
            (f"On {host}: {change}", palette.BOLD_STYLE),
            (
                "An empty field is no limit. The engine reverts the change automatically, even if "
                "this console is closed. Evicted tokens do not come back.",
                palette.MUTED_STYLE,
            ),
            id="terms-said",
        )

    def compose(self) -> ComposeResult:
        now = units.latency(self._p95_ms, 0)
        canary = "0..1, of the quality canary"
        with Vertical(id="trial", classes="page") as page:
            page.border_title = "apply on trial"
            subtitle = "tab next   enter start   esc cancel"
            page.border_subtitle = terminal_text(self, subtitle)
            for name, label, value, unit in (
                ("minutes", "reverted unless kept within", str(DEFAULT_MINUTES), "minutes"),
                ("p95", "reverted if inter-token p95 is above", "", f"ms, now {now}"),
                ("preemptions", "reverted if preemptions are above", "", "since the change"),
                ("agreement", "reverted if agreement is below", "", canary),
                ("lost", "reverted if log-prob. lost is above", "", "nats a token"),
            ):
                with Horizontal(classes="term"):
                    yield Label(f" {label}", classes="term-label")
                    yield Input(value, id=name, compact=True, classes="term-value")
                    yield Label(f" {terminal_text(self, unit)}")
            yield self._text

    def action_start(self) -> None:
        names = ("minutes", "p95", "preemptions", "agreement", "lost")
        values = [self.query_one(f"#{name}", Input).value for name in names]
        try:
            self.dismiss(parse_terms(*values))
        except ValueError as error:
            self._text.set_paragraphs((f"{error}.", palette.BAD_STYLE))
