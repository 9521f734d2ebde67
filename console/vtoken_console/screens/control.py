"""The settings page: change a value, see what it would do, then apply it, for good or on trial.

One question is under way at most; the newest draft is asked about next, what came between is not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.timer import Timer

from vtoken.client import ProblemError
from vtoken_console.changes import controls
from vtoken_console.changes.descriptions import (
    applied_paragraphs,
    calibration_paragraphs,
    confirm_paragraphs,
    gate_paragraphs,
    irreversible,
    may_evict,
    price_paragraphs,
    what_if_paragraphs,
)
from vtoken_console.changes.fields import POLICY, make_fields, make_patch, show_value
from vtoken_console.changes.trials import Terms
from vtoken_console.frame.view import View
from vtoken_console.look import palette
from vtoken_console.look.palette import Paragraph
from vtoken_console.screens.confirm import ConfirmScreen
from vtoken_console.screens.trial import TrialScreen
from vtoken_console.widgets.form import Form
from vtoken_console.widgets.guide_panel import GUIDE_LINES, GuidePanel
from vtoken_console.widgets.lines import as_shown
from vtoken_console.widgets.notice import problem_text
from vtoken_console.widgets.outcome import Outcome
from vtoken_console.widgets.trial_bar import TrialBar

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.changes.watch import Watch
    from vtoken_console.feed.source import Source

ASK_AFTER_S = 0.15  # a value must rest this long before the server is asked about it
OUTCOME_LINES = 10  # its border included


class ControlScreen(ModalScreen[None]):
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-short"),
        (30, "-tall"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("enter", "apply", id="apply", show=False, priority=True),
        Binding("ctrl+t", "trial", id="trial", show=False, priority=True),
        Binding("ctrl+y", "keep", id="keep", show=False, priority=True),
    ]

    def __init__(self, source: Source, watch: Watch, first: str, read_only_reason: str) -> None:
        super().__init__()
        self._read_only_reason = read_only_reason
        self._source = source
        self._watch = watch
        self._page = Vertical(id="control", classes="page")
        self._form = Form(first, id="form")
        self._outcome = Outcome(id="outcome")
        self._trial_bar = TrialBar(id="trial-bar")
        self._guide = GuidePanel(id="guide")
        self._ask_timer: Timer | None = None
        self._height = 0
        self._idling = True  # no change is drafted
        self._draft_number = 0  # rises with every change of the draft
        self._asking = False  # a what-if is under way
        self._settled = False  # an answer to an action stands until the next change of the draft

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
        self._idle()
        self.add_class("-composed")

    def show(self, view: View) -> None:
        """New desired and effective values, while the draft stays."""
        self._read_only_reason = view.read_only_reason
        keys = f"{view.key('apply')} apply   {view.key('trial')} on trial   esc close"
        if view.read_only_reason:
            keys = "apply is off: read-only   esc close"
        steps = "←→ step   shift+←→ leap   type a value   del reset   "
        keys = f"{self._form.place}   {keys}" if self._form.place else keys
        wide = self._page.size.width > len(steps + keys) + 4
        self._page.border_subtitle = as_shown(self, steps + keys if wide else keys)
        self._refill()
        if self._idling:
            self._idle()
        for widget in (self._trial_bar, self._guide, self._form, self._outcome):
            widget.show(view)

    def _refill(self) -> None:
        model = self._source.feed.model
        config = model.config
        if config is None or model.hello is None:
            return
        chosen = self._form.draft.get(POLICY, config.desired.policy.name)
        self._form.set_fields(make_fields(config, model.hello.policies, str(chosen)))
        room = self.app.size.height * 96 // 100 - OUTCOME_LINES - 2 - (config.trial is not None)
        room -= GUIDE_LINES if self._guide.display else 0
        height = max(4, min(self._form.num_lines, room))
        if height != self._height:  # a style set anew lays the page out anew
            self._form.styles.height = self._height = height
        title = f"settings · desired revision {config.revision}"
        waiting = [f.label.strip() for f in self._form.fields if f.desired != f.effective]
        if waiting:
            title += f" · effective revision {config.effective_revision}, waiting: "
            title += ", ".join(waiting[:3])
        self._page.border_title = as_shown(self, title)

    @property
    def patch(self) -> dict[str, Any]:
        """What applying the draft would send."""
        return make_patch(self._form.fields, self._form.draft)

    @property
    def _gates(self) -> list[wire.Gate]:
        status = self._source.feed.model.status
        return status.fragmentation.gates if status is not None else []

    # ------------------------------------------------------------ what would happen

    def _idle(self) -> None:
        self._idling = True
        status = self._source.feed.model.status
        muted = palette.MUTED_STYLE
        self._outcome.say(
            ("Change a value to see what it would do. An automatic round now:", muted),
            *gate_paragraphs(self._gates, self._gates),
            *price_paragraphs(status.prices if status is not None else None),
            *calibration_paragraphs(status.calibration if status is not None else None),
        )

    def on_form_changed(self) -> None:
        self._refill()
        if self._ask_timer is not None:
            self._ask_timer.stop()
        self._draft_number += 1
        self._settled = False
        if not self.patch:
            self._idle()
            return
        self._idling = False
        self._ask_timer = self.set_timer(ASK_AFTER_S, self._ask)

    def _ask(self) -> None:
        if not self._asking:
            self._asking = True
            self.run_worker(self._ask_newest(), group="what-if")

    async def _ask_newest(self) -> None:
        """Asks about the newest draft until the answer is to the newest draft."""
        try:
            asked = -1
            while asked != self._draft_number and self.patch and not self._settled:
                asked = self._draft_number
                try:
                    result = await self._source.rest.patch_config(self.patch, validate_only=True)
                    said = what_if_paragraphs(result, self._gates)
                except ProblemError as error:
                    said = _refusal(error.problem)
                if asked == self._draft_number and not self._settled:
                    self._outcome.say(*said)
        finally:
            self._asking = False

    # ------------------------------------------------------------ applying

    def _refused(self) -> bool:
        """Whether nothing may be changed; then says why, above what would happen."""
        if self._read_only_reason:
            why = (f"Not applied: {self._read_only_reason}. Nothing was sent.", palette.BAD_STYLE)
            self._outcome.say(why, *(said for said in self._outcome.paragraphs if said != why))
            self._idling = False
        return bool(self._read_only_reason)

    def action_apply(self) -> None:
        if not self._refused():
            self._go(None)

    def action_trial(self) -> None:
        if self._refused():
            return
        change, config = self.patch, self._source.feed.model.config
        if not change or config is None:
            self._nothing()
            return
        desired = {f.path: f.desired for f in self._form.fields}
        told = ", ".join(
            f"{path[-1]} {show_value(desired[path])} → {show_value(value)}"
            for path, value in self._form.draft.items()
        )
        status = self._source.feed.model.status
        p95 = status.latency.inter_token.p95_ms if status and status.latency else None

        def chosen(terms: Terms | None) -> None:
            if terms is not None:
                self._go(terms)

        self.app.push_screen(TrialScreen(told, self._host, p95), chosen)

    def action_keep(self) -> None:
        if self._refused():
            return
        self._settle()
        self.run_worker(self._keep(), group="apply", exclusive=True)

    async def _keep(self) -> None:
        try:
            self._outcome.say((await controls.confirm(self._source.rest), palette.GOOD_STYLE))
        except ProblemError as error:
            self._outcome.say(*_refusal(error.problem))

    def _nothing(self) -> None:
        self._outcome.say(("Nothing to apply: no value is changed.", palette.MUTED_STYLE))

    def _settle(self) -> None:
        """From here on the outcome is that of an action, until the draft changes."""
        self._settled, self._idling = True, False
        if self._ask_timer is not None:
            self._ask_timer.stop()

    def _go(self, terms: Terms | None) -> None:
        patch, config = self.patch, self._source.feed.model.config
        if not patch or config is None:
            self._nothing()
            return
        self._settle()
        self.run_worker(self._apply(patch, config, terms), group="apply", exclusive=True)

    @property
    def _host(self) -> str:
        return urlsplit(self._source.name).netloc or self._source.name

    async def _apply(
        self, patch: dict[str, Any], config: wire.ConfigDocument, terms: Terms | None
    ) -> None:
        rest, params = self._source.rest, terms.params() if terms is not None else {}
        try:
            if may_evict(patch) and not await self._is_agreed(patch, config):
                self._outcome.say(("Cancelled. Nothing was changed.", palette.TEXT_STYLE))
                return
            self._watch.calls += 1
            try:
                result = await rest.patch_config(patch, revision=config.revision, **params)
                self._watch.own(result, time.monotonic())
            finally:
                self._watch.calls -= 1
        except ProblemError as error:
            self._outcome.say(*_refusal(error.problem))
            return
        self._form.draft.clear()
        self._form.moved()
        self._outcome.say(*applied_paragraphs(result))

    async def _is_agreed(self, patch: dict[str, Any], config: wire.ConfigDocument) -> bool:
        """Whether nothing is lost for good, or somebody wants that."""
        result = await self._source.rest.patch_config(patch, validate_only=True)
        evicted = result.what_if.evicted_tokens if result.what_if is not None else 0
        live = [row.live for row in self._source.feed.model.requests.values()]
        why = irreversible(result.changes, config.desired.policy.name, evicted, live)
        if why is None:
            return True
        status = self._source.feed.model.status
        model = status.model if status is not None else ""
        question = confirm_paragraphs(why, self._host, model, result)
        answer: bool = await self.app.push_screen_wait(ConfirmScreen(question, "Apply"))
        return answer

    def action_leave(self) -> None:
        self.dismiss()


def _refusal(problem: wire.Problem) -> list[Paragraph]:
    return [
        (f"Refused: {problem_text(problem)}", palette.BAD_STYLE),
        ("Nothing was changed.", palette.TEXT_STYLE),
    ]
