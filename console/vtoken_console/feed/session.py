"""The source of the session: a server or a recording.

Imports modules that need numpy or a network library here, after the first frame.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vtoken.client import OutcomeUnknown
    from vtoken.wire.reducer import StreamState
    from vtoken_console.feed.replay import Replay
    from vtoken_console.feed.source import Source

HEAVY = ("httpx", "websockets.asyncio.client", "vtoken_console.feed.live")


class Session:
    """`source` is None until its libraries are imported.

    `engine`: the one to read and to change, of a server with several; None: the first, and changes
    are made on all. `read_only`: requested by the viewer. `recording`: a file to play from `moment`
    on. `on_lookup`: called when the outcome of a change is unknown and is looked up.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        fps: float,
        read_only: bool,
        recording: Path | None,
        moment: str | None,
        engine: int | None = None,
    ) -> None:
        self.url = url
        self.read_only = read_only
        self.source: Source | None = None
        self.replay: Replay | None = None  # the source, if it is a recording
        self.on_lookup: Callable[[OutcomeUnknown], None] = lambda _: None
        self._token = token
        self._fps = fps
        self._recording = recording
        self._moment = moment
        self._engine = engine

    @property
    def model(self) -> StreamState | None:
        """The newest state; None while there is no source."""
        return self.source.feed.model if self.source is not None else None

    async def run(self) -> None:
        """Fills the source's feed until cancelled."""
        for name in HEAVY:
            await asyncio.to_thread(importlib.import_module, name)
        if self._recording is not None:
            from vtoken_console.feed.replay import Replay

            self.source = self.replay = Replay(self._recording, moment=self._moment)
        else:
            from vtoken_console.feed.live import LiveSource

            self.source = LiveSource(
                self.url, self._token, self._fps, engine=self._engine, on_lookup=self.on_lookup
            )
        await self.source.run()
