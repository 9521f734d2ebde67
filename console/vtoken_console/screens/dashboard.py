"""The main screen: header, sentence, gauge, the panels that fit, keys."""

from __future__ import annotations

import time

from textual import events
from textual.app import ComposeResult
from textual.containers import Container
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input

from vtoken_console.frame.filters import EXAMPLE, NO_FILTER, parse
from vtoken_console.frame.keys import Key
from vtoken_console.frame.view import View
from vtoken_console.widgets.events import Events
from vtoken_console.widgets.figures.charts import Charts
from vtoken_console.widgets.figures.figures import Figures
from vtoken_console.widgets.figures.gauge import Gauge
from vtoken_console.widgets.figures.sentence import Sentence
from vtoken_console.widgets.figures.waiting import Waiting
from vtoken_console.widgets.guide_panel import GuidePanel
from vtoken_console.widgets.header import Header
from vtoken_console.widgets.heatmap.heatmap import Heatmap
from vtoken_console.widgets.keybar import KeyBar
from vtoken_console.widgets.lines import LinesWidget
from vtoken_console.widgets.notice import SHOWN_S, Note, Notice
from vtoken_console.widgets.replay_bar import ReplayBar
from vtoken_console.widgets.requests import Requests
from vtoken_console.widgets.trial_bar import TrialBar

VIEWS = ("all", "pool", "requests", "events", "charts", "figures")


class Dashboard(Screen[None]):
    AUTO_FOCUS = "#pool"

    class FrameRequested(Message):
        """Requests a frame at once, to show a choice of the viewer."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        super().__init__()
        self._view_key = next(key.shown for key in keys if key.id == "view")
        self.filter = NO_FILTER
        self._focus_before: Widget | None = None
        self.shown = "all"
        self.synced = False
        self.heatmap = Heatmap(id="pool")
        self._notice = Notice(id="notice")
        self._trial_bar = TrialBar(id="trial-bar")
        self._guide = GuidePanel(id="guide")

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield Sentence(id="sentence")
        yield Gauge(id="gauge")
        yield self._trial_bar
        yield Waiting(id="waiting")
        with Container(id="panels"):
            with Container(id="left"):
                yield self.heatmap
                yield Charts(id="charts")
            with Container(id="right"):
                yield Requests(id="requests")
                yield Events(id="events")
        yield Figures(id="figures")
        yield self._guide
        yield self._notice
        yield Input(id="filter", placeholder=EXAMPLE, compact=True)
        yield ReplayBar(id="replay")
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        self._notice.display = self._trial_bar.display = self._guide.display = False
        self.query_one("#filter").display = False

    def show(self, view: View) -> None:
        """Passes the newest view to every visible widget."""
        synced = view.model is not None
        if view.replay is not None and not self.has_class("-replay"):
            self.add_class("-replay")
            self.query_one("#replay").focus()
        if synced != self.synced:
            self.synced = synced
            self.set_class(synced, "-synced")
            if synced and self.focused is None:
                self.heatmap.focus()
        self._trial_bar.show(view)  # these two set their own `display`
        self._guide.show(view)
        for widget in self.query(LinesWidget):
            if widget.is_on_screen or widget.view is None:
                widget.show(view)

    def show_message(self, text: str, *, is_error: bool = False, sticky: bool = False) -> None:
        """Shows a message above the keys; an error stays until escape or the next message.

        A sticky one, not caused by a key, stays until escape.
        """
        until = None if is_error or sticky else time.monotonic() + SHOWN_S
        self._notice.add(Note(text, is_error or sticky, until, sticky))

    def request_frame(self) -> None:
        self.post_message(self.FrameRequested())

    def set_view(self, name: str) -> None:
        """Shows all panels, or one of them alone."""
        for other in VIEWS:
            self.set_class(other == name, f"-only-{other}")
        self.shown = name
        if name != "all":
            target = self.query_one(f"#{name}")
            if target.can_focus:
                target.focus()

    def next_view(self) -> None:
        """Cycles through all panels and each panel alone."""
        at = VIEWS.index(self.shown) + 1
        name, after = (VIEWS[n % len(VIEWS)] for n in (at, at + 1))
        self.set_view(name)
        alone = f"Only {name}; {self._view_key} goes on, to {after}."
        self.show_message("All panels." if name == "all" else alone)

    def next_sort(self) -> None:
        self.show_message(f"Requests sorted by {self.query_one(Requests).next_sort()}.")

    def next_event_kinds(self) -> None:
        all_kinds = self.query_one(Events).toggle_kinds()
        self.show_message(
            "The log shows every event." if all_kinds else "The log shows moves and changes."
        )

    def open_filter(self) -> None:
        box = self.query_one("#filter", Input)
        if self.focused is not box:
            self._focus_before = self.focused
        box.display = True
        self.set_focus(box)  # at once, so that the next key is text, not a command

    def on_input_changed(self, event: Input.Changed) -> None:
        self.filter = parse(event.value)
        self.query_one("#filter").set_class(bool(self.filter.problem), "-wrong")
        self.request_frame()

    def on_input_submitted(self) -> None:
        self.query_one("#filter").display = False
        self.set_focus(self._focus_before)

    def on_key(self, event: events.Key) -> None:
        if event.key != "escape":
            return
        box = self.query_one("#filter", Input)
        if box.display or box.value:
            event.stop()
            box.value = ""
            box.display = False
            self.set_focus(self._focus_before)
        else:
            self._notice.clear()
