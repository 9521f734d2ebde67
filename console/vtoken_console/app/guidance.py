"""Runs the guide in the application: updated once a frame, ended by its last step or by a key."""

from __future__ import annotations

from textual.app import App

from vtoken_console.frame.guide import Facts, Guide, mark_seen, seen_path
from vtoken_console.frame.view import View
from vtoken_console.screens.dashboard import Dashboard

PAGES = {"Dashboard": "", "ControlScreen": "settings", "HelpScreen": "help"}


class Guidance:
    """`guide` is None unless `wanted`, and None again after it has ended."""

    def __init__(self, app: App[int], dashboard: Dashboard, *, wanted: bool) -> None:
        self._app = app
        self._dashboard = dashboard
        self.guide = Guide() if wanted else None

    def update(self, view: View) -> None:
        """Passes the newest facts to the guide, and ends it after its last step."""
        model = view.model
        if self.guide is None or model is None or not self._dashboard.synced:
            return
        cursor = self._dashboard.heatmap.cursor
        if cursor < 0:
            return  # the heatmap is not drawn yet
        screen = self._app.screen
        page = type(screen).__name__
        status, config = model.status, model.config
        fragmentation = status.fragmentation if status is not None else None
        self.guide.update(
            Facts(
                page=PAGES.get(page, page),
                cursor=cursor,
                drafted=bool(getattr(screen, "patch", None)),
                revision=config.revision if config is not None else 0,
                relocations=status.reclamation.relocations if status is not None else 0,
                wasteful=fragmentation is not None and fragmentation.f > fragmentation.theta_f,
                on_trial=config is not None and config.trial is not None,
            )
        )
        if self.guide.finished:
            self._end("That was the guide. `vtoken demo --guide` shows it again.")

    def skip(self) -> None:
        if self.guide is None:
            self._dashboard.show_message(
                "No guide is running; `vtoken console --guide` starts one."
            )
        else:
            self._end("Guide skipped. `vtoken demo --guide` shows it again.")

    def _end(self, text: str) -> None:
        self.guide = None
        error = mark_seen(seen_path())
        self._dashboard.show_message(
            f"{text} But {error}." if error else text, is_error=bool(error)
        )
