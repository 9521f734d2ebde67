"""The reducer of a stream: a frozen state, and `apply`, which returns the state after a message.

Shared by the console and the recorder. Imports only the wire; numpy with the first arrays. `apply`
returns a new StreamState or raises ResyncNeeded; a message is never applied partly. Invariants:
1. messages of one epoch are applied in `seq` order without gaps
2. len(live) == len(flags) == hello.geometry.num_blocks once `synced`; an array that the server
   does not send is empty
3. `events` ascend by their own `seq`, each at most once: at most MAX_EVENTS of the frequent kinds
   and, independently, at most MAX_EVENTS of the other kinds
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from vtoken import wire
from vtoken.wire.engine_state import Difference, EngineState

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    U8 = npt.NDArray[np.uint8]
    U16 = npt.NDArray[np.uint16]

MAX_EVENTS = 500
DTYPES = dict(wire.BLOCK_ARRAYS)


class ResyncNeeded(Exception):  # noqa: N818 - a request to the client, not an error
    """The stream cannot continue from the held state; the client must reconnect for a snapshot."""


@cache
def _empty(dtype: str) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = wire.unpack_array(b"", dtype)
    return array


@dataclass(frozen=True, slots=True, eq=False)
class StreamState:
    """The newest received state. Arrays are replaced, never written in place."""

    hello: wire.Hello | None = None
    epoch: str = ""
    seq: int = -1
    step: int = 0
    ts: float = 0.0  # of the newest message, by the server's clock [s]
    step_ts: float = 0.0  # when `step` last rose on this connection; 0: not seen yet
    synced: bool = False
    engine: EngineState = field(default_factory=EngineState)
    events: tuple[wire.Event, ...] = ()
    missed_events: int = 0

    @property
    def status(self) -> wire.Status | None:
        return self.engine.status

    @property
    def config(self) -> wire.ConfigDocument | None:
        return self.engine.config

    @property
    def requests(self) -> Mapping[str, wire.RequestRow]:
        return self.engine.requests

    @property
    def live(self) -> U16:
        """[N] live slots of a block."""
        return self._blocks("live")

    @property
    def flags(self) -> U8:
        """[N] wire.FLAG_*."""
        return self._blocks("flags")

    @property
    def owner(self) -> U16:
        """[N] RequestRow.number of the newest holder, 0: free."""
        return self._blocks("owner")

    def _blocks(self, name: str) -> npt.NDArray[Any]:
        array = self.engine.blocks.get(name)
        return _empty(DTYPES[name]) if array is None else array

    @property
    def block_size(self) -> int:
        return self.hello.geometry.block_size if self.hello else 1

    @property
    def num_blocks(self) -> int:
        return len(self.live)


def apply(state: StreamState, message: wire.StreamMessage) -> StreamState:
    """`state` after `message`.

    Raises ResyncNeeded on a gap, another epoch, an unexpected message or arrays of a wrong size.
    """
    try:
        return _apply(state, message)
    except (ValueError, IndexError) as error:  # arrays of different sizes
        raise ResyncNeeded(f"{type(message).__name__.lower()}: {error}") from error


def _apply(state: StreamState, message: wire.StreamMessage) -> StreamState:
    if isinstance(message, wire.Hello):
        kept = state if message.epoch == state.epoch else StreamState()
        return replace(
            kept,
            hello=message,
            epoch=message.epoch,
            seq=message.seq,
            step=message.step,
            ts=message.ts,
            step_ts=0.0,
            synced=message.resumed and kept.synced,
        )
    if state.hello is None:
        raise ResyncNeeded(f"expected hello first, found {type(message).__name__.lower()}")
    if message.epoch != state.epoch:
        raise ResyncNeeded(f"epoch changed from {state.epoch} to {message.epoch}")
    if message.seq != state.seq + 1:
        raise ResyncNeeded(f"expected message {state.seq + 1}, found {message.seq}")
    step_ts = message.ts if message.step > state.step else state.step_ts
    state = replace(state, seq=message.seq, step=message.step, ts=message.ts, step_ts=step_ts)
    if isinstance(message, wire.Snapshot | wire.Delta):
        return _changed(state, message)
    if isinstance(message, wire.EventMessage):
        return with_events(state, (message.event,))
    if isinstance(message, wire.Dropped):
        return replace(state, missed_events=state.missed_events + message.n)
    return state


def _changed(state: StreamState, message: wire.Snapshot | wire.Delta) -> StreamState:
    assert state.hello is not None
    difference = Difference.of(message)
    if isinstance(message, wire.Snapshot):
        num_blocks = state.hello.geometry.num_blocks
        for name, array in difference.blocks.items():
            if len(array) != num_blocks:
                raise ResyncNeeded(
                    f"snapshot.{name} has {len(array)} blocks, expected {num_blocks}"
                )
    elif not state.synced:
        raise ResyncNeeded("expected snapshot, found delta")
    return replace(state, synced=True, engine=state.engine.after(difference))


def with_events(state: StreamState, events: Iterable[wire.Event]) -> StreamState:
    """`state` with `events` merged into its log: ordered by `seq`, without duplicates, bounded."""
    known, events = state.events, list(events)
    if len(events) == 1 and (not known or events[0].seq > known[-1].seq):
        return replace(state, events=_bounded([*known, *events]))  # the order of a live stream
    merged = {event.seq: event for event in known}
    for event in events:
        merged[event.seq] = event
    if len(merged) == len(known) and not any(merged[e.seq] is not e for e in known):
        return state
    return replace(state, events=_bounded([merged[seq] for seq in sorted(merged)]))


def _bounded(events: list[wire.Event]) -> tuple[wire.Event, ...]:
    """The newest MAX_EVENTS of the frequent kinds and of the other kinds; `events`: in order."""
    if len(events) <= MAX_EVENTS:
        return tuple(events)
    room, kept = [MAX_EVENTS, MAX_EVENTS], []
    for event in reversed(events):
        frequent = event.kind in wire.FREQUENT_KINDS
        room[frequent] -= 1
        if room[frequent] >= 0:
            kept.append(event)
    return tuple(reversed(kept))
