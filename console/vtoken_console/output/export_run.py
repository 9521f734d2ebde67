"""`vtoken console --export FILE`: the console without a terminal, for one picture or document.

Runs the real application, headless, until it has data, and writes what it shows.
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
    """Nothing was written; the message says why."""


def run(app: ConsoleApp, path: Path, size: tuple[int, int]) -> list[Path]:
    """Writes `path`, of the kind that its ending names; CSV is three files. Raises ExportError."""
    if path.suffix.removeprefix(".") not in KINDS:
        known = ", ".join(f".{kind}" for kind in KINDS)
        raise ExportError(f"{path}: the ending must be one of {known}")
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
        app.tick()  # what a first frame looks up is gone once the application is left
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
    """One file; of several, each keeps the part of its name that tells it from the others."""
    if num_files > 1:
        path = path.with_name(f"{path.stem}-{name.rpartition('-')[2]}")
    with path.open("xb") as file:
        file.write(data)
    return path
