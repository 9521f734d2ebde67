"""The settings page: change a value, see what it would do, then apply it, permanently or on trial.

At most one what-if is in flight. The next one is for the newest edits; those in between are
skipped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.timer import Timer

from vtoken.client import ProblemError
from vtoken.wire import void_settings
from vtoken_console.changes.controls import applied_text
from vtoken_console.changes.descriptions import (
    applied_paragraphs,
    confirm_paragraphs,
    irreversible,
    may_evict,
    what_if_paragraphs,
)
from vtoken_console.changes.fields import (
    POLICY,
    edited_values,
    make_fields,
    make_patch,
    paths_of,
    show_value,
)
from vtoken_console.frame.view import View
from vtoken_console.screens.confirm import ConfirmScreen
from vtoken_console.screens.trial import TrialScreen
from vtoken_console.style import palette
from vtoken_console.style.palette import Paragraph
from vtoken_console.widgets.form import Form
from vtoken_console.widgets.guide_panel import GUIDE_LINES, GuidePanel
from vtoken_console.widgets.outcome import Outcome, problem_text
from vtoken_console.widgets.trial_bar import TrialBar

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.changes.watch import ChangeWatch
    from vtoken_console.feed.session import Source

DEBOUNCE_S = 0.15  # from a change of the edits to its what-if
EXAMPLES = ("goodput<0.95", "requests{state=waiting}>20")  # guards, with an objective and without
OUTCOME_LINES = 8  # its border included


class ControlScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", show=False),
        Binding("enter", "apply", id="apply", show=False, priority=True),
        Binding("ctrl+t", "trial", id="trial", show=False, priority=True),
    ]

    def __init__(
        self,
        source: Source,
        watch: ChangeWatch,
        first: str,
        read_only_reason: str,
        proposed: Mapping[str, Any] | None = None,
    ) -> None:
        """`first`: the setting under the cursor; `proposed`: a patch to begin with."""
        super().__init__()
        self._proposed = proposed or {}
        self._read_only_reason = read_only_reason
        self._source = source
        self._watch = watch
        self._page = Vertical(id="control", classes="page")
        self._form = Form(first, paths_of(proposed or {}), id="form")
        self._outcome = Outcome(id="outcome")
        self._trial_bar = TrialBar(id="trial-bar")
        self._guide = GuidePanel(id="guide")
        self._debounce: Timer | None = None
        self._height = 0
        self._edit_number = 0  # incremented with every change of the edits
        self._querying = False  # a what-if is in flight
        self._settled = False  # the outcome is that of an action, until the edits change

    def compose(self) -> ComposeResult:
        with self._page:
            yield self._trial_bar
            yield self._form
            yield self._outcome
            yield self._guide

    def on_mount(self) -> None:
        self._trial_bar.display = self._guide.display = False
        self._outcome.border_title = "what would happen"
        self._refill()
        self._form.focus()
        self.on_form_changed()

    def show(self, view: View) -> None:
        """Updates desired and effective values; the edits stay."""
        self._read_only_reason = view.read_only_reason
        keys = f"{view.key('apply')} apply   {view.key('trial')} on trial   esc close"
        if view.read_only_reason:
            keys = "apply is off: read-only   esc close"
        steps = "←→ step   shift+←→ leap   type a value   del reset   "
        keys = f"{self._form.range_text}   {keys}" if self._form.range_text else keys
        wide = self._page.size.width > len(steps + keys) + 4
        self._page.border_subtitle = steps + keys if wide else keys
        self._refill()
        for widget in (self._trial_bar, self._guide, self._form, self._outcome):
            widget.show(view)

    def _refill(self) -> None:
        model = self._source.feed.model
        config = model.config
        if config is None or model.hello is None:
            return
        chosen = self._form.edits.get(POLICY, config.desired.policy.name)
        fields = make_fields(config, model.hello.policies, str(chosen))
        values = edited_values(config.desired, make_patch(fields, self._form.edits))
        self._form.set_fields(fields, void_settings(values))
        room = self.app.size.height * 96 // 100 - OUTCOME_LINES - 2 - (config.trial is not None)
        room -= GUIDE_LINES if self._guide.display else 0
        height = max(4, min(self._form.num_lines, room))
        if height != self._height:  # setting a style triggers a new layout
            self._form.styles.height = self._height = height
        title = f"settings · revision {config.revision}"
        waiting = [f.name for f in self._form.fields if f.desired != f.effective]
        if waiting:
            title += f" is set, {config.effective_revision} in force; waiting: "
            title += ", ".join(waiting[:3])
        self._page.border_title = title

    @property
    def patch(self) -> dict[str, Any]:
        """The patch that applying the edits sends."""
        return make_patch(self._form.fields, self._form.edits)

    # ------------------------------------------------------------ what would happen

    def _idle(self) -> None:
        self._outcome.set_paragraphs(
            ("Change a value to see what it would do.", palette.MUTED_STYLE)
        )

    def on_form_changed(self) -> None:
        self._refill()
        if self._debounce is not None:
            self._debounce.stop()
        self._edit_number += 1
        self._settled = False
        if not self.patch:
            self._idle()
            return
        self._debounce = self.set_timer(DEBOUNCE_S, self._query)

    def _query(self) -> None:
        if not self._querying:
            self._querying = True
            self.run_worker(self._query_newest(), group="what-if")

    async def _query_newest(self) -> None:
        """Runs what-ifs until the newest edits have a result."""
        try:
            number = -1
            while number != self._edit_number and self.patch and not self._settled:
                number = self._edit_number
                try:
                    result = await self._source.rest.patch_config(self.patch, validate_only=True)
                    paragraphs = what_if_paragraphs(result)
                except ProblemError as error:
                    paragraphs = _refusal(error.problem)
                if number == self._edit_number and not self._settled:
                    self._outcome.set_paragraphs(*paragraphs)
        finally:
            self._querying = False

    # ------------------------------------------------------------ applying

    def _refused(self) -> bool:
        """Whether changes are off; if so, shows the reason above the what-if."""
        if self._read_only_reason:
            note = (f"Not applied: {self._read_only_reason}. Nothing was sent.", palette.BAD_STYLE)
            others = (part for part in self._outcome.paragraphs if part != note)
            self._outcome.set_paragraphs(note, *others)
        return bool(self._read_only_reason)

    def action_apply(self) -> None:
        if not self._refused():
            self._start_apply({})

    def action_trial(self) -> None:
        if self._refused():
            return
        change, config = self.patch, self._source.feed.model.config
        if not change or config is None:
            self._show_no_change()
            return
        desired = {f.path: f.desired for f in self._form.fields}
        changes = ", ".join(
            f"{path[-1]} {show_value(desired[path])} → {show_value(value)}"
            for path, value in self._form.edits.items()
        )
        status = self._source.feed.model.status
        p95 = status.latency.inter_token.p95_ms if status and status.latency else None

        def start(terms: dict[str, Any] | None) -> None:
            if terms is not None:
                self._start_apply(terms)

        example = EXAMPLES[not (status and status.slo)]
        self.app.push_screen(TrialScreen(changes, self._host, p95, example), start)

    def show_lookup(self, text: str) -> None:
        """Shows that the outcome of the applied edits is unknown and is looked up."""
        self._outcome.set_paragraphs((text, palette.WARN_STYLE))

    def _show_no_change(self) -> None:
        self._outcome.set_paragraphs(
            ("Nothing to apply: no value is changed.", palette.MUTED_STYLE)
        )

    def _settle(self) -> None:
        """Reserves the outcome for an action's result until the edits change."""
        self._settled = True
        if self._debounce is not None:
            self._debounce.stop()

    def _start_apply(self, terms: dict[str, Any]) -> None:
        patch, config = self.patch, self._source.feed.model.config
        if not patch or config is None:
            self._show_no_change()
            return
        self._settle()
        self.run_worker(self._apply(patch, config, terms), group="apply", exclusive=True)

    @property
    def _host(self) -> str:
        return urlsplit(self._source.name).netloc or self._source.name

    async def _apply(
        self, patch: dict[str, Any], config: wire.ConfigDocument, terms: dict[str, Any]
    ) -> None:
        rest = self._source.rest
        try:
            if may_evict(patch) and not await self._is_confirmed(patch, config):
                self._outcome.set_paragraphs(
                    ("Cancelled. Nothing was changed.", palette.TEXT_STYLE)
                )
                return
            self._watch.calls_in_flight += 1
            try:
                result = await rest.patch_config(patch, revision=config.revision, **terms)
                self._watch.add_own(result, time.monotonic())
            finally:
                self._watch.calls_in_flight -= 1
        except ProblemError as error:
            self._outcome.set_paragraphs(*_refusal(error.problem))
            return
        self._form.edits.clear()
        self._form.cursor_moved()
        if result.trial is not None and self.is_current:
            self.app.notify(f"On trial: {applied_text(result)}.")
            self.dismiss()  # the dashboard has the bar that counts down
            return
        self._outcome.set_paragraphs(*applied_paragraphs(result))

    async def _is_confirmed(self, patch: dict[str, Any], config: wire.ConfigDocument) -> bool:
        """Whether the change loses nothing irreversibly, or the user confirms it."""
        result = await self._source.rest.patch_config(patch, validate_only=True)
        found, evicted = result.what_if, 0
        if found is not None:
            without = found.without_change
            is_more = without is None or found.evicted_tokens > without.evicted_tokens
            evicted = found.evicted_tokens if is_more else 0
        after = edited_values(config.desired, patch)
        rows = [*self._source.feed.model.requests.values()]
        status = self._source.feed.model.status
        parking = status.parking if status is not None else None
        reason = irreversible(config.desired, after, evicted, rows, parking)
        if reason is None:
            return True
        model = status.model if status is not None else ""
        question = confirm_paragraphs(reason, self._host, model, result)
        answer: bool = await self.app.push_screen_wait(ConfirmScreen(question))
        return answer


def _refusal(problem: wire.Problem) -> list[Paragraph]:
    return [
        (f"Refused: {problem_text(problem)}", palette.BAD_STYLE),
        ("Nothing was changed.", palette.TEXT_STYLE),
    ]
