"""The guide's place in the application: fed once a frame, ended by its last step or by one key."""

from __future__ import annotations

from vtoken_console.app.base import Base
from vtoken_console.app.guide import Guide, facts_of, remember, seen_path
from vtoken_console.app.view import View
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
            facts_of(
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
