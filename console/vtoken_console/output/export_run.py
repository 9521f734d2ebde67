"""`vtoken console --export FILE`: exports one image or document without a terminal.

Runs the real application headless until it has data, then writes what it shows.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from vtoken_console.app.app import ConsoleApp
from vtoken_console.export.files import KINDS
from vtoken_console.export.raster import PngUnavailable

DATA_TIMEOUT_S = 30.0
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
        while app.source is None or not app.source.ready:
            if time.monotonic() > deadline:
                why = app.source.feed.connection.error if app.source else "not started"
                raise ExportError(
                    f"no data from {app.session.url} within {DATA_TIMEOUT_S:g} s: {why}"
                )
            await pilot.pause(0.05)
        app.tick()  # the first frame needs the application to be running
        if problem := app.source.replay and app.source.replay.note:
            raise ExportError(problem)
        await pilot.pause(SETTLE_S)
        try:
            files = await app.exporter.files(kind)
        except PngUnavailable as reason:
            raise ExportError(f"no PNG: {reason}") from reason
    try:
        return [_write(path, name, data, len(files)) for name, data in files.items()]
    except OSError as error:
        raise ExportError(str(error)) from error


def _write(path: Path, name: str, data: bytes, num_files: int) -> Path:
    """Writes one file. With several files, each appends its table's name to the stem."""
    if num_files > 1:
        path = path.with_name(f"{path.stem}-{name.rpartition('-')[2]}")
    with path.open("xb") as file:
        file.write(data)
    return path
