"""The messages of the stream, from the server to a client."""

from __future__ import annotations

from vtoken.wire.doc import Doc, PackedArray
from vtoken.wire.documents import Event, Geometry, RequestRow
from vtoken.wire.settings import ConfigDocument, PolicyInfo
from vtoken.wire.status import Point, Status


class Message(Doc, tag_field="type"):
    """Base of stream messages. `seq` increases by one per message within a connection's epoch."""

    epoch: str
    seq: int
    step: int
    ts: float


class Hello(Message, tag="hello"):
    schema: int
    vtoken_version: str
    vllm_version: str
    model: str
    device: str
    geometry: Geometry
    policies: list[PolicyInfo]
    topics: list[str]
    fps: float  # granted
    can_control: bool
    resumed: bool = False
    read_only_reason: str = ""  # why `can_control` is false
    can_read_text: bool = False  # whether this client may read the text of requests
    engine: int | None = None  # whose stream this is; None: an older server
    engines: list[int] = []  # of this server; []: an older one, which has one


class Snapshot(Message, tag="snapshot"):
    status: Status | None  # topic metrics
    config: ConfigDocument
    live: PackedArray | None  # u16[num_blocks]; topic blocks
    flags: PackedArray | None
    requests: list[RequestRow] | None  # topic requests
    owner: PackedArray | None = None  # u16[num_blocks]; topic blocks
    # Of the last minutes, oldest first; topic metrics, in the first snapshot of a connection.
    history: list[Point] = []


class Delta(Message, tag="delta"):
    """The changes since the last snapshot or delta. A field that is None has not changed."""

    block_ids: PackedArray | None = None  # u32[k]
    block_live: PackedArray | None = None  # u16[k]
    block_flags: PackedArray | None = None  # u8[k]
    block_owner: PackedArray | None = None  # u16[k]
    requests_changed: list[RequestRow] | None = None
    requests_removed: list[str] | None = None
    status: Status | None = None
    config: ConfigDocument | None = None


class EventMessage(Message, tag="event"):
    event: Event


class Dropped(Message, tag="dropped"):
    n: int  # events that this client has missed; a new snapshot follows


class Heartbeat(Message, tag="heartbeat"):
    pass


StreamMessage = Hello | Snapshot | Delta | EventMessage | Dropped | Heartbeat
