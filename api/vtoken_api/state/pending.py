"""The changes that engines were told to make and that are not in the audit log yet.

With several API processes each is also a file in the folder that they share. A process that takes
over tells the engines the same calls again, under the same ids. An engine makes a call of one id
once, so this completes what the process before it began, or learns what became of it.

1. The file exists before the first engine gets the call, and until the audit log has the entry.
2. A file that its writer did not complete was never begun, and is passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import msgspec

from vtoken.base.documents import Decoder, MalformedError
from vtoken.wire import commands
from vtoken_api.log import logger
from vtoken_api.problems import refuse
from vtoken_api.state.lock import FILE_MODE

SUFFIX = ".change"


class Making(msgspec.Struct):
    """A change as it is made: what each engine is told, on whose behalf, and until when.

    `action`: its name in the audit log; `asked`: the caller's own call. `part`: of a change that
    several engines make one after the other.
    """

    change_id: str
    actor: str
    action: str
    asked: commands.AnyCall
    calls: dict[int, commands.AnyCall]  # by the rank of the engine
    expires_ts: float  # an engine that gets it later refuses it
    part: bool = False


_makings: Decoder[Making] = Decoder(Making, "msgpack")


class Pending:
    """Changes under way, in `folder` if there is one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._open: set[str] = set()

    def __contains__(self, change_id: str) -> bool:
        """Whether the change is under way in this process."""
        return change_id in self._open

    async def begin(self, making: Making) -> None:
        """Note a change before it is made; raises 409 while another of its id is under way."""
        change_id = making.change_id
        if change_id in self._open:
            raise refuse(
                409,
                f"the change {change_id!r} is under way; GET /vtoken/v1/changes/{change_id} tells "
                "what becomes of it",
                title="Handled already",
                field="X-VToken-Change",
                value=change_id,
                bound="a new id for every change",
            )
        self._open.add(change_id)
        if self._folder is not None:
            try:
                await asyncio.to_thread(self._write, making)
            except OSError as error:
                logger.warning("vtoken: cannot note the change %s: %s", change_id, error)

    async def end(self, change_id: str) -> None:
        """Forget a change that is in the audit log, or that was not made."""
        self._open.discard(change_id)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._path(change_id).unlink, missing_ok=True)

    async def left(self) -> list[Making]:
        """What another process began and did not end, oldest first; they are under way here now."""
        if self._folder is None:
            return []
        found = await asyncio.to_thread(self._read, self._folder)
        self._open.update(making.change_id for making in found)
        return found

    def _path(self, change_id: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{change_id}{SUFFIX}"

    def _write(self, making: Making) -> None:
        path = self._path(making.change_id)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(file, msgspec.msgpack.encode(making))
        finally:
            os.close(file)

    def _read(self, folder: Path) -> list[Making]:
        found: list[tuple[float, Making]] = []
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError, MalformedError):
                made = _makings.decode(path.read_bytes())
                found.append((path.stat().st_mtime, made))
        return [making for _, making in sorted(found, key=lambda pair: pair[0])]
