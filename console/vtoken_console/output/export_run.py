"""`vtoken console --export FILE`: exports one image or document without a terminal.

Runs the real application headless until it has data, then writes what it shows.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from vtoken_console.app.app import ConsoleApp
from vtoken_console.export.files import KINDS, write_new
from vtoken_console.export.raster import PngUnavailable
from vtoken_console.feed.connection import Connection, State

DATA_TIMEOUT_S = 30.0
NOT_YET = ("429", "503")  # refusals of a server that may answer the next call
SETTLE_S = 1.2  # for panels that are drawn once a second


class ExportError(Exception):
    """The export failed; the message gives the reason. No file was written."""


def run(app: ConsoleApp, path: Path, size: tuple[int, int]) -> list[Path]:
    """Writes `path` in the format of its suffix; CSV is three files. Raises ExportError."""
    if path.suffix.removeprefix(".") not in KINDS:
        known = ", ".join(f".{kind}" for kind in KINDS)
        raise ExportError(f"{path}: the suffix must be one of {known}")
    return asyncio.run(_run(app, path, size))


async def _run(app: ConsoleApp, path: Path, size: tuple[int, int]) -> list[Path]:
    kind = path.suffix.removeprefix(".")
    async with app.run_test(size=size) as pilot:
        deadline = time.monotonic() + DATA_TIMEOUT_S
        while not app.is_ready:
            connection = app.source.feed.connection if app.source else Connection()
            if connection.state is State.REFUSED and not connection.error.startswith(NOT_YET):
                raise ExportError(connection.error)
            if time.monotonic() > deadline:
                why = connection.error or "not started"
                where = app.session.url or "the servers"
                raise ExportError(f"no data from {where} within {DATA_TIMEOUT_S:g} s: {why}")
            await pilot.pause(0.05)
        app.tick()  # the first frame needs the application to be running
        if app.session.replay is not None and (problem := app.session.replay.note):
            raise ExportError(problem)  # not the moment that was asked for
        await pilot.pause(SETTLE_S)
        try:
            files = await app.export_files(kind)
        except PngUnavailable as reason:
            raise ExportError(f"no PNG: {reason}") from reason
    return _write(path, files)


def _write(path: Path, files: dict[str, bytes]) -> list[Path]:
    """Writes all files or none. With several, each appends its table's name to the stem."""
    written: list[Path] = []
    for name, data in files.items():
        if len(files) > 1:
            target = path.with_name(f"{path.stem}-{name.rpartition('-')[2]}")
        else:
            target = path
        try:
            write_new(target, data)
        except OSError as error:
            for each in written:
                each.unlink(missing_ok=True)
            raise ExportError(f"{target} cannot be written: {error.strerror}") from error
        written.append(target)
    return written
