"""Block activity since this console started: transitions of blocks, and moves of tokens.

Compares the newest StreamState with the previous one, once a frame. N blocks. Memory is bounded:
some arrays over N and a ring of HISTORY transitions. Changes carry server time (`StreamState.ts`);
movements carry local monotonic time, so that they fade at the same pace in a replay. A server
restart, another geometry or a clock that goes back (a seek in a replay) resets everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken import wire
from vtoken.wire.reducer import StreamState
from vtoken_console.style.cells import F32, U16

FADE_S = 1.2  # how long a movement is drawn
HISTORY = 1 << 16
MAX_NAMES = 1 << 13

F64 = npt.NDArray[np.float64]

TAKEN, FREED, SHARED, UNSHARED, HASHED, UNHASHED = range(6)
TRANSITION_TEXTS = (
    "taken by",
    "freed by",
    "became shared",
    "no longer shared",
    "entered the prefix cache",
    "left the prefix cache",
)
_BITS = ((wire.FLAG_SHARED, SHARED, UNSHARED), (wire.FLAG_HASHED, HASHED, UNHASHED))
_STEADY = ~np.uint8(wire.FLAG_IN_FLIGHT)


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One line of a block's history."""

    ts: float
    text: str


class Activity:
    """Call `observe` with every frame's model; all other methods only read."""

    def __init__(self) -> None:
        self.ts = 0.0  # server time of the newest model
        self.since = 0.0  # server time at which observation began
        self._moved_at = -math.inf  # the newest movement, monotonic [s]
        self.names: dict[int, str] = {}  # RequestRow.number -> id, of recent requests
        self._model: StreamState | None = None
        self._event_seq = 0
        self._reset(0)

    def _reset(self, num_blocks: int) -> None:
        self.since = self.ts
        self._left_at: F64 = np.full(num_blocks, -np.inf)
        self._arrived_at: F64 = np.full(num_blocks, -np.inf)
        self._moved_at = -math.inf
        self._ring = np.zeros(
            HISTORY, [("ts", "f8"), ("block", "u4"), ("owner", "u2"), ("what", "u1")]
        )
        self._written = 0  # entries ever put into the ring

    @property
    def num_blocks(self) -> int:
        return len(self._left_at)

    # ------------------------------------------------------------ observing

    def observe(self, model: StreamState, now: float) -> None:
        """Records the changes of the newest model at monotonic time `now` [s]."""
        old, self._model = self._model, model
        if model is old:
            return
        back, self.ts = model.ts < self.ts, model.ts
        newest = model.events[-1].seq if model.events else 0
        if old is None or back or model.epoch != old.epoch or model.num_blocks != self.num_blocks:
            self._reset(model.num_blocks)
            self._event_seq = newest  # earlier moves are not drawn
        else:
            self._record_changes(old, model)
            if newest != self._event_seq:
                self._track_moves(model, now)
                self._event_seq = newest
        if old is None or model.requests is not old.requests:
            self._learn_names(model.requests.values())

    def _learn_names(self, rows: Iterable[wire.RequestRow]) -> None:
        for row in rows:
            if row.number and self.names.get(row.number) != row.id:
                self.names.pop(row.number, None)
                self.names[row.number] = row.id
        while len(self.names) > MAX_NAMES:
            del self.names[next(iter(self.names))]

    def _record_changes(self, old: StreamState, new: StreamState) -> None:
        if new.live is old.live and new.flags is old.flags:
            return
        ids = np.flatnonzero((new.live != old.live) | ((new.flags ^ old.flags) & _STEADY != 0))
        if not len(ids):
            return
        was, now = old.flags[ids], new.flags[ids]
        used_before, used = was & wire.FLAG_USED != 0, now & wire.FLAG_USED != 0
        self._record(ids[~used_before & used], TAKEN, new.owner)
        self._record(ids[used_before & ~used], FREED, old.owner)
        for bit, gained, lost in _BITS:
            both = used_before & used
            self._record(ids[both & (was & bit == 0) & (now & bit != 0)], gained, new.owner)
            self._record(ids[both & (was & bit != 0) & (now & bit == 0)], lost, new.owner)

    def _record(self, blocks: npt.NDArray[Any], what: int, owner: U16) -> None:
        blocks = blocks[-HISTORY:]
        places = (self._written + np.arange(len(blocks))) % HISTORY
        self._ring["ts"][places] = self.ts
        self._ring["block"][places] = blocks
        self._ring["owner"][places] = owner[blocks] if len(owner) else 0
        self._ring["what"][places] = what
        self._written += len(blocks)

    def _track_moves(self, model: StreamState, now: float) -> None:
        for event in reversed(model.events):
            if event.seq <= self._event_seq:
                break
            if event.kind != "relocation" or event.ts < model.ts - FADE_S:
                continue  # one of a log that was loaded later is past
            self._left_at[_blocks(event.data.get("source_blocks"), self.num_blocks)] = now
            self._arrived_at[_blocks(event.data.get("destination_blocks"), self.num_blocks)] = now
            self._moved_at = now

    # ------------------------------------------------------------ reading

    def is_moving(self, now: float) -> bool:
        """Whether a movement is still drawn at monotonic time `now` [s]."""
        return now - self._moved_at < FADE_S

    def moves(self, now: float) -> tuple[F32, F32]:
        """Freshness of sources and destinations, from 1 (now) to 0 (faded), [N] each."""
        left = np.clip(1 - (now - self._left_at) / FADE_S, 0, 1).astype(np.float32)
        arrived = np.clip(1 - (now - self._arrived_at) / FADE_S, 0, 1).astype(np.float32)
        return left, arrived

    def history(self, block: int, events: Iterable[wire.Event]) -> list[HistoryEntry]:
        """The observed transitions of `block`, and its moves in `events`, newest first."""
        kept = self._ring[: min(self._written, HISTORY)]
        out = []
        for entry in kept[kept["block"] == block]:
            what, number = int(entry["what"]), int(entry["owner"])
            whose = self.names.get(number, f"#{number}") if number else "a request"
            text = (
                f"{TRANSITION_TEXTS[what]} {whose}"
                if what in (TAKEN, FREED)
                else TRANSITION_TEXTS[what]
            )
            out.append(HistoryEntry(float(entry["ts"]), text))
        for event in events:
            if event.kind == "relocation":
                whose = str(event.data.get("request_id", "a request"))
                if block in event.data.get("source_blocks", ()):
                    out.append(HistoryEntry(event.ts, f"tokens moved out, of {whose}"))
                if block in event.data.get("destination_blocks", ()):
                    out.append(HistoryEntry(event.ts, f"tokens moved in, of {whose}"))
        return sorted(out, key=lambda seen: seen.ts, reverse=True)


def _blocks(ids: Any, num_blocks: int) -> npt.NDArray[np.int64]:
    """The block ids of an event that are in the pool."""
    found = np.asarray(ids if ids is not None else (), dtype=np.int64)
    return found[(found >= 0) & (found < num_blocks)]
