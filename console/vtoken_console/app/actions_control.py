"""The keys that change the server, or say what would: pause, compact, undo, keep, settings.

Knows the wire through `controls` only, which is imported when first needed.
"""

from __future__ import annotations

from vtoken_console.app.base import Base


class ControlActions(Base):
    def action_pause(self) -> None:
        from vtoken_console.changes import controls

        status = self.client.model.status if self.client else None
        state = status.reclamation.state if status else "auto"
        watch = self.change_watch
        self.control("pause", lambda client: controls.toggle_pause(client.rest, state, watch))

    def action_compact(self) -> None:
        from vtoken_console.changes import controls

        self.control("compact", lambda client: controls.compact(client.rest))

    def action_compact_dry(self) -> None:
        from vtoken_console.changes import controls

        self.try_out(lambda client: controls.compact(client.rest, dry_run=True))

    def action_undo(self) -> None:
        from vtoken_console.changes import controls

        self.control("undo", lambda client: controls.undo(client.rest, self.change_watch))

    def action_undo_dry(self) -> None:
        from vtoken_console.changes import controls

        self.try_out(lambda client: controls.undo_dry(client.rest))

    def action_confirm(self) -> None:
        from vtoken_console.changes import controls

        self.control("confirm", lambda client: controls.confirm(client.rest))

    async def action_control(self, field: str) -> None:
        from vtoken_console.screens.control import ControlScreen

        if not self.refused(dry_run=True) and self.client is not None:
            why = self.make_view().read_only_reason
            await self.push_screen(ControlScreen(self.client, self.change_watch, field, why))
