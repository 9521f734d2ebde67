"""The guide's place in the application: fed once a frame, ended by its last step or by one key."""

from __future__ import annotations

from vtoken_console.app.base import Base
from vtoken_console.frame.guide import Facts, Guide, remember, seen_path
from vtoken_console.frame.view import View
from vtoken_console.widgets.heatmap.heatmap import Heatmap

PAGES = {"Dashboard": "", "ControlScreen": "settings", "HelpScreen": "help"}


class GuideActions(Base):
    def start_guide(self) -> None:
        self.guide = Guide(lambda key_id: next(k.shown for k in self.keys if k.id == key_id))

    def guide_on(self, view: View) -> None:
        """Tells the guide what happened, and ends it after its last step."""
        if self.guide is None or view.model is None or not self.dashboard.synced:
            return
        cursor = self.dashboard.query_one(Heatmap).cursor
        if cursor < 0:
            return  # the map is not drawn yet
        page = type(self.screen).__name__
        self.guide.look(
            _facts(
                view,
                page=PAGES.get(page, page),
                cursor=cursor,
                drafted=bool(getattr(self.screen, "patch", None)),
            )
        )
        if self.guide.over:
            self._end("That was the guide. `vtoken demo --guide` shows it again.")

    def action_skip_guide(self) -> None:
        if self.guide is None:
            self.say("No guide is running; `vtoken console --guide` starts one.")
        else:
            self._end("Guide skipped. `vtoken demo --guide` shows it again.")

    def _end(self, text: str) -> None:
        self.guide = None
        wrong = remember(seen_path())
        self.say(f"{text} But {wrong}." if wrong else text, is_error=bool(wrong))


def _facts(view: View, *, page: str, cursor: int, drafted: bool) -> Facts:
    """What a step can wait for, from one frame."""
    assert view.model is not None
    status, config = view.model.status, view.model.config
    fragmentation = status.fragmentation if status is not None else None
    return Facts(
        page=page,
        cursor=cursor,
        drafted=drafted,
        revision=config.revision if config is not None else 0,
        relocations=status.reclamation.relocations if status is not None else 0,
        wasteful=fragmentation is not None and fragmentation.f > fragmentation.theta_f,
        on_trial=config is not None and config.trial is not None,
    )
