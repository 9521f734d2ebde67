"""Exports the state on the screen to files; existing files are never overwritten.

CSV is three tables: blocks, requests, series. JSON holds the wire's documents.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vtoken import wire
from vtoken.sentences import flag_words
from vtoken.wire.reducer import StreamState
from vtoken_console.feed.series import BIN_S, NUM_BINS, Series

KINDS = ("svg", "png", "csv", "json")


class Exported(wire.Doc):
    """The state on the screen, as documents of the server's API."""

    source: str  # URL, or name of the recording
    ts: float
    status: wire.Status | None
    config: wire.ConfigDocument | None
    requests: list[wire.RequestRow]
    blocks: wire.BlocksDocument
    events: list[wire.Event]


class ExportedRow(wire.Doc):
    """One row of the fleet page."""

    name: str
    url: str
    condition: str
    tokens_per_s: float
    engine: wire.EngineRow


class ExportedFleet(wire.Doc):
    """The fleet page; `sentences`: what is wrong, the worst first."""

    ts: float
    sentences: list[str]
    engines: list[ExportedRow]


def fleet_document(rows: Sequence[ExportedRow], sentences: Sequence[str], ts: float) -> bytes:
    """The JSON document of the fleet page."""
    exported = ExportedFleet(ts=ts, sentences=[*sentences], engines=[*rows])
    return msgspec.json.format(msgspec.json.encode(exported), indent=1) + b"\n"


def fleet_table(rows: Sequence[ExportedRow]) -> bytes:
    """The fleet page as one CSV table."""
    head = ("name", "url", "condition", "revision", "policy", "f", "free", "total", "running")
    return _csv((*head, "waiting", "tokens_per_s", "problem"), map(_engine, rows))


def _engine(row: ExportedRow) -> Sequence[Any]:
    found: Sequence[Any] = [""] * 6
    if (status := row.engine.status) is not None:
        blocks, requests = status.blocks, status.requests
        found = [status.policy.name, f"{status.fragmentation.f:.6g}", blocks.free]
        found = [*found, blocks.total, requests.running, requests.waiting]
    begin = (row.name, row.url, row.condition, row.engine.revision)
    return [*begin, *found, f"{row.tokens_per_s:.6g}", row.engine.problem]


def stem(ts: float) -> str:
    """The stem of the file names, with the local time of the exported state."""
    return time.strftime("vtoken-%Y%m%d-%H%M%S", time.localtime(ts))


def document(model: StreamState, source: str, ts: float) -> bytes:
    """The JSON document of `model`."""
    blocks = wire.BlocksDocument(
        block_size=model.block_size,
        num_blocks=model.num_blocks,
        step=model.step,
        live=model.live.tolist(),
        flags=model.flags.tolist(),
        owner=model.owner.tolist(),
    )
    exported = Exported(
        source=source,
        ts=ts,
        status=model.status,
        config=model.config,
        requests=list(model.requests.values()),
        blocks=blocks,
        events=list(model.events),
    )
    return msgspec.json.format(msgspec.json.encode(exported), indent=1) + b"\n"


def tables(model: StreamState, series: Series) -> dict[str, bytes]:
    """Every table as CSV, by its name."""
    return {
        "blocks": _csv(("id", "live", "state", "owner"), _blocks(model)),
        "requests": _csv(wire.RequestRow.__struct_fields__, _requests(model)),
        "series": _csv(("ts", *series.names), _series(series)),
    }


def _blocks(model: StreamState) -> Iterable[Sequence[Any]]:
    names = {row.number: row.id for row in model.requests.values() if row.number}
    owners = model.owner.tolist() or [0] * model.num_blocks
    rows = zip(model.live.tolist(), model.flags.tolist(), owners, strict=True)
    for block, (live, flags, owner) in enumerate(rows):
        words = ["used"] if flags & wire.FLAG_USED else []
        state = [*words, *flag_words(flags)]
        yield block, live, " ".join(state) or "free", names.get(owner, "")


def _requests(model: StreamState) -> Iterable[Sequence[Any]]:
    for row in model.requests.values():
        yield [getattr(row, name) for name in wire.RequestRow.__struct_fields__]


def _series(series: Series) -> Iterable[Sequence[Any]]:
    window = series.window(int(BIN_S * NUM_BINS), NUM_BINS)
    end = (np.floor(series.last_ts / BIN_S) + 1) * BIN_S
    for column in np.flatnonzero(~np.isnan(window.values).all(axis=0)).tolist():
        values = window.values[:, column].tolist()
        ts = end - (NUM_BINS - column) * BIN_S
        yield [f"{ts:.1f}", *("" if np.isnan(value) else f"{value:.6g}" for value in values)]


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue().encode()


def write(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """Writes `files`; numbers names that exist. Raises OSError and leaves no partial file."""
    return [_write_numbered(folder / name, data) for name, data in files.items()]


def _write_numbered(path: Path, data: bytes) -> Path:
    wanted, number = path, 1
    while True:
        try:
            write_new(path, data)
        except FileExistsError:
            number += 1
            path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        else:
            return path


def write_new(path: Path, data: bytes) -> None:
    """Writes a new file. Raises OSError and leaves no partial file."""
    file = path.open("xb")
    try:
        with file:
            file.write(data)
    except OSError:
        path.unlink(missing_ok=True)
        raise
