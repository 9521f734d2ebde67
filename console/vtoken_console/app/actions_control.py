"""The keys that change the server, or say what would: pause, compact, undo, keep, settings.

Knows the wire through `controls` only, which is imported when first needed.
"""

from __future__ import annotations

from vtoken_console.app.base import Base


class ControlActions(Base):
    def action_pause(self) -> None:
        from vtoken_console.changes import controls

        status = self.source.feed.model.status if self.source else None
        state = status.reclamation.state if status else "auto"
        watch = self.change_watch
        self.control("pause", lambda source: controls.toggle_pause(source.rest, state, watch))

    def action_compact(self) -> None:
        from vtoken_console.changes import controls

        self.control("compact", lambda source: controls.compact(source.rest))

    def action_compact_dry(self) -> None:
        from vtoken_console.changes import controls

        self.try_out(lambda source: controls.compact(source.rest, dry_run=True))

    def action_undo(self) -> None:
        from vtoken_console.changes import controls

        self.control("undo", lambda source: controls.undo(source.rest, self.change_watch))

    def action_undo_dry(self) -> None:
        from vtoken_console.changes import controls

        self.try_out(lambda source: controls.undo_dry(source.rest))

    def action_confirm(self) -> None:
        from vtoken_console.changes import controls

        self.control("confirm", lambda source: controls.confirm(source.rest))

    async def action_control(self, field: str) -> None:
        from vtoken_console.screens.control import ControlScreen

        if not self.refused(dry_run=True) and self.source is not None:
            why = self.make_view().read_only_reason
            await self.push_screen(ControlScreen(self.source, self.change_watch, field, why))
