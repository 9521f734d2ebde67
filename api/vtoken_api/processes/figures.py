"""What each API process counts itself, in a file a process, so that any can add all up.

A process that has ended keeps its counts, since counters never fall. Its clients are gone.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

import msgspec

from vtoken_api.state.lock import FileLock

SUFFIX = ".figures"


class EngineFigures(msgspec.Struct):
    """Of one engine: clients of its stream now, events that they missed, failed writes of its
    flight recorder."""

    clients: int = 0
    dropped_events: int = 0
    recorder_faults: int = 0


class Figures(msgspec.Struct):
    """`refused`: calls by HTTP status; `engines`: by rank."""

    refused: dict[int, int] = {}
    engines: dict[int, EngineFigures] = {}

    def plus(self, other: Figures) -> Figures:
        """Both added up."""
        ranks = sorted({*self.engines, *other.engines})
        return Figures(
            refused=dict(Counter(self.refused) + Counter(other.refused)),
            engines={rank: _sum(self.of(rank), other.of(rank)) for rank in ranks},
        )

    def of(self, rank: int) -> EngineFigures:
        return self.engines.get(rank, EngineFigures())


def _sum(one: EngineFigures, other: EngineFigures) -> EngineFigures:
    return EngineFigures(
        one.clients + other.clients,
        one.dropped_events + other.dropped_events,
        one.recorder_faults + other.recorder_faults,
    )


class FigureFiles:
    """The files in `folder`, of which this process writes one. Raises no errors of the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / f"{os.getpid()}-{id(self):x}{SUFFIX}"
        self._alive = FileLock(_lock_of(self._path))
        self._written: Figures | None = None

    def write(self, figures: Figures) -> None:
        """Replace this process's figures, if they differ."""
        if figures == self._written:
            return
        part = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):
            self._alive.acquire()
            part.write_bytes(msgspec.msgpack.encode(figures))
            part.replace(self._path)
            self._written = figures

    def others(self) -> Figures:
        """The sum over all processes but this one."""
        total = Figures()
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path == self._path:
                continue
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                found = msgspec.msgpack.decode(path.read_bytes(), type=Figures)
                if not FileLock.is_held(_lock_of(path)):
                    for engine in found.engines.values():
                        engine.clients = 0
                total = total.plus(found)
        return total

    def close(self) -> None:
        """This process has no clients any more."""
        self._alive.release()


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".alive")
