"""The settings page: change a value, see what it would do, then apply it; all or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.timer import Timer

from vtoken.client import ProblemError
from vtoken_console import palette, units
from vtoken_console.asciify import asciify
from vtoken_console.controls import applied_text, change_text
from vtoken_console.fields import POLICY, make_fields, make_patch, show_value
from vtoken_console.view import View
from vtoken_console.widgets.form import Form
from vtoken_console.widgets.notice import problem_text
from vtoken_console.widgets.outcome import Outcome, Paragraph

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken_console.client import Client

ASK_AFTER_S = 0.15  # a value must rest this long before the server is asked about it
OUTCOME_LINES = 9
KEYS = "←→ step   shift+←→ leap   type a value   del reset   enter apply   esc close"


class ControlScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("enter", "apply", show=False, priority=True),
    ]

    def __init__(self, client: Client, first: str) -> None:
        super().__init__()
        self._client = client
        self._page = Vertical(id="control", classes="page")
        self._form = Form(first, id="form")
        self._outcome = Outcome(id="outcome")
        self._ask_timer: Timer | None = None
        self._height = 0
        self._idling = True  # the outcome tells of the setting under the cursor
        self._asked = 0  # number of the newest question; older answers are not shown

    def compose(self) -> ComposeResult:
        with self._page:
            yield self._form
            yield self._outcome

    def on_mount(self) -> None:
        page = self._page
        page.border_subtitle = asciify(KEYS) if self._plain else KEYS
        self._outcome.border_title = "what would happen"
        self._refill()
        self._form.focus()
        self._idle()
        self.add_class("-composed")

    @property
    def _plain(self) -> bool:
        return self.app.has_class("-ascii")

    def show(self, view: View) -> None:
        """New desired and effective values, while the draft stays."""
        self._refill()
        if self._idling:
            self._idle()
        self._form.show(view)
        self._outcome.show(view)

    def _refill(self) -> None:
        model = self._client.model
        if model.config is None or model.hello is None:
            return
        chosen = self._form.draft.get(POLICY, model.config.desired.policy.name)
        self._form.set_fields(make_fields(model.config, model.hello.policies, str(chosen)))
        room = self.app.size.height * 9 // 10 - OUTCOME_LINES - 2
        height = max(4, min(len(self._form.fields) + 1, room))
        if height != self._height:  # a style set anew lays the page out anew
            self._form.styles.height = self._height = height
        title = f"settings · revision {model.config.revision}"
        self._page.border_title = asciify(title) if self._plain else title

    @property
    def patch(self) -> dict[str, Any]:
        """What applying the draft would send."""
        return make_patch(self._form.fields, self._form.draft)

    def _idle(self) -> None:
        self._idling = True
        field = self._form.current
        about = [(f"{field.label.strip()}: {field.summary}", palette.MUTED_STYLE)] if field else []
        self._outcome.say(*about, ("Change a value to see what it would do.", palette.MUTED_STYLE))

    def on_form_changed(self) -> None:
        self._refill()
        if self._ask_timer is not None:
            self._ask_timer.stop()
        self._asked += 1
        if not self.patch:
            self._idle()
            return
        self._idling = False
        self._ask_timer = self.set_timer(ASK_AFTER_S, self._ask)

    def _ask(self) -> None:
        self.run_worker(self._what_if(self._asked, self.patch), group="what-if", exclusive=True)

    async def _what_if(self, number: int, patch: dict[str, Any]) -> None:
        try:
            result = await self._client.rest.patch_config(patch, validate_only=True)
            said = what_if_paragraphs(result)
        except ProblemError as error:
            said = _refusal(error.problem)
        if number == self._asked:
            self._outcome.say(*said)

    def action_apply(self) -> None:
        patch = self.patch
        config = self._client.model.config
        if not patch or config is None:
            self._outcome.say(("Nothing to apply: no value is changed.", palette.MUTED_STYLE))
            return
        self._asked += 1
        self._idling = False
        if self._ask_timer is not None:
            self._ask_timer.stop()
        self.run_worker(self._apply(patch, config.revision), group="apply", exclusive=True)

    async def _apply(self, patch: dict[str, Any], revision: int) -> None:
        try:
            result = await self._client.rest.patch_config(patch, revision=revision)
        except ProblemError as error:
            self._outcome.say(*_refusal(error.problem))
            return
        self._form.draft.clear()
        self._form.moved()
        effective = result.effective
        self._outcome.say(
            (f"Applied: {applied_text(result)}.", palette.GOOD_STYLE),
            (
                f"In effect: theta_f {show_value(effective.theta_f)}, B {effective.batch_size}, "
                f"policy {effective.policy.name}, budget {effective.budget_tokens}, "
                f"planner {effective.planner}, reclamation {effective.reclamation}.",
                palette.TEXT_STYLE,
            ),
            ("esc closes, then u undoes.", palette.MUTED_STYLE),
        )

    def action_leave(self) -> None:
        self.dismiss()


def what_if_paragraphs(result: wire.PatchResult) -> list[Paragraph]:
    """A validate_only answer in words."""
    said: list[Paragraph] = [
        (change_text(result.changes) or "This changes nothing.", palette.BOLD_STYLE)
    ]
    what = result.what_if
    if what is not None:
        said += [
            ("", palette.TEXT_STYLE),
            (f"evicts now  {units.count(what.evicted_tokens, 9)} tokens", palette.TEXT_STYLE),
            (
                f"moves now   {units.count(what.moved_tokens, 9)} tokens "
                f"({units.data_size(what.moved_bytes)})",
                palette.TEXT_STYLE,
            ),
            (f"frees now   {units.count(what.freed_blocks, 9)} blocks", palette.TEXT_STYLE),
        ]
        if what.deferred_reason:
            said.append((f"deferred: {what.deferred_reason}", palette.WARN_STYLE))
    said += [(note, palette.WARN_STYLE) for note in result.notes]
    return [*said, ("", palette.TEXT_STYLE), ("enter applies it.", palette.MUTED_STYLE)]


def _refusal(problem: wire.Problem) -> list[Paragraph]:
    return [
        (problem_text(problem), palette.BAD_STYLE),
        ("Nothing was changed.", palette.TEXT_STYLE),
    ]
