"""An engine under a test's control: random pools, chosen events, real telemetry."""

from __future__ import annotations

import time
from copy import deepcopy

import msgspec
import numpy as np
import zmq
from msgspec.structs import replace

from tests.support.documents import DESCRIBED, FRAME, ROW, STATUS
from vtoken import wire
from vtoken.wire import commands


class ScriptedEngine:
    """N blocks, R requests, `step()` changes some of them; XPUB telemetry as the engine's."""

    def __init__(self, num_blocks: int = 64, num_requests: int = 4, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_blocks = num_blocks
        self.steps = 0
        self.live = self.rng.integers(0, 17, num_blocks).astype("<u2")
        self.flags = self.rng.integers(0, 32, num_blocks).astype("u1")
        self.owner = self.rng.integers(0, 4, num_blocks).astype("<u2")
        self.rows = {f"r{i}": self._row(f"r{i}") for i in range(num_requests)}
        self.held: list[wire.Event] = []
        self.last_seq = 0
        self.socket = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.subscribed: set[bytes] = set()

    def close(self) -> None:
        self.socket.close()

    # ------------------------------------------------------------ changes

    def step(self, changes: int = 5) -> None:
        """Change some blocks and requests."""
        self.steps += 1
        where = self.rng.integers(0, self.num_blocks, changes)
        self.live = self.live.copy()
        self.flags = self.flags.copy()
        self.owner = self.owner.copy()
        self.live[where] = self.rng.integers(0, 17, changes)
        self.flags[where] = self.rng.integers(0, 32, changes)
        self.owner[where] = self.rng.integers(0, 4, changes)
        name = f"r{self.rng.integers(0, 8)}"
        if name in self.rows and self.rng.random() < 0.5:
            del self.rows[name]
        else:
            self.rows[name] = self._row(name)

    def add_events(self, count: int) -> list[wire.Event]:
        """Add events to the engine without publishing them."""
        new = []
        for _ in range(count):
            self.last_seq += 1
            new.append(
                wire.Event(
                    seq=self.last_seq,
                    ts=time.time(),
                    step=self.steps,
                    kind="server",
                    summary=f"event {self.last_seq}",
                )
            )
        self.held += new
        return new

    def publish_events(self, events: list[wire.Event]) -> None:
        self.socket.send_multipart([wire.TOPIC_EVENTS, msgspec.msgpack.encode(events)])

    def publish_frame(self) -> None:
        self.socket.send_multipart([wire.TOPIC_STATE, msgspec.msgpack.encode(self.frame())])

    def poll_subscriptions(self) -> set[bytes]:
        """The topics with a subscriber."""
        while self.socket.poll(0):
            message = self.socket.recv()
            (self.subscribed.add if message[0] else self.subscribed.discard)(message[1:])
        return self.subscribed

    # ------------------------------------------------------------ replies

    def handle(self, command: commands.Command) -> wire.Reply:
        match command.call:
            case commands.Describe():
                return wire.Reply(value=self.describe())
            case commands.Frame():
                return wire.Reply(value=self.frame())
            case commands.History():
                return wire.Reply(value=[])
            case commands.Events(after=after, limit=limit, kind=kind):
                return wire.Reply(value=self.page(after, limit, kind))
        return wire.Reply(problem=wire.Problem(status=404, title="?", detail=command.op))

    def page(self, after: int, limit: int, kind: str | None = None) -> wire.EventPage:
        first = self.held[0].seq if self.held else self.last_seq + 1
        events = [e for e in self.held if e.seq > after and kind in (None, e.kind)][:limit]
        return wire.EventPage(events=events, first_seq=first, last_seq=self.last_seq)

    def describe(self) -> wire.Describe:
        geometry = replace(DESCRIBED.geometry, num_blocks=self.num_blocks)
        return replace(DESCRIBED, geometry=geometry, telemetry_endpoint=self.endpoint)

    def frame(self) -> wire.Frame:
        return replace(
            FRAME,
            step=self.steps,
            status=self.status(),
            live=self.live.tobytes(),
            flags=self.flags.tobytes(),
            requests=list(self.rows.values()),
            owner=self.owner.tobytes(),
        )

    def status(self) -> wire.Status:
        free = int((self.flags == 0).sum())
        return replace(
            deepcopy(STATUS),
            step=self.steps,
            ts=time.time(),
            blocks=replace(
                STATUS.blocks, total=self.num_blocks, free=free, used=self.num_blocks - free
            ),
            tokens=wire.TokenCounts(live=int(self.live.sum()), dead=0),
            requests=wire.RequestCounts(running=len(self.rows), waiting=0, preempted=0),
        )

    def _row(self, name: str) -> wire.RequestRow:
        return replace(ROW, id=name, live=int(self.rng.integers(1, 1000)))
