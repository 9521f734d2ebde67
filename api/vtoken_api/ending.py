"""Ends for its client a session that the engine has ended.

vLLM's front end takes an abort that comes from the engine for the end of a session's turn: the
client would wait, and its next turn would begin another session. So the process that serves the
client aborts the session too, as when the client leaves.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vtoken import wire


class Ending:
    """Aborts the sessions of one API process."""

    def __init__(self, engine_client: Any) -> None:
        self._client = engine_client
        self._aborts: set[asyncio.Task[None]] = set()

    def take(self, event: wire.Event) -> None:
        """Abort the session that an event of the server ends, if it ends one."""
        if event.data.get("detail") == "ended":
            abort = self._client.abort(event.data["request_id"], internal=True)
            task = asyncio.create_task(abort, name="vtoken-end")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
