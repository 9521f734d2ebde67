"""What passes between the engine and the API's processes: answers to commands, and frames.

No client reads these structs.
"""

from __future__ import annotations

from typing import Any

from vtoken.wire.doc import Doc
from vtoken.wire.documents import Geometry, Problem, RequestRow, TextPage
from vtoken.wire.settings import ConfigDocument, PolicyInfo
from vtoken.wire.status import Status

TEXT_CONTEXT_TOKENS = 64  # more than any character or decoder spans
NO_TOKEN_ID = -1

TOPIC_STATE = b"state"  # frames [topic, msgpack Frame]
TOPIC_EVENTS = b"events"  # frames [topic, msgpack list[Event]]


class Describe(Doc):
    epoch: str
    vtoken_version: str
    vllm_version: str
    model: str
    device: str
    geometry: Geometry
    telemetry_endpoint: str  # ZMQ SUB connects here
    policies: list[PolicyInfo]
    started_ts: float


class TextSource(Doc):
    """A page of a text before it is decoded."""

    page: TextPage  # its texts are None
    # Vocabulary ids of up to TEXT_CONTEXT_TOKENS tokens before the page, then of the page;
    # NO_TOKEN_ID for a position of a prompt that was given as embeddings.
    words: list[int]


class Accepted(Doc):
    """The answer to `vtoken.wire.commands.Validate`: the newest revision, and field -> [old, new]
    of what the change would change."""

    revision: int
    changes: dict[str, list[Any]]


class Reply(Doc):
    """The answer to a `vtoken.wire.commands.Command`."""

    value: Any = None
    problem: Problem | None = None
    engine_s: float = 0.0  # CPU time of the engine's thread


class Frame(Doc):
    """The state of the engine.

    The command `frame` returns a complete one. On topic `state`, frames are published only while it
    has a subscriber, and most have the blocks alone: the rest is then that of the newest frame with
    a status. A lost frame needs no repeat.
    """

    step: int
    live: bytes  # u16[num_blocks] little-endian
    flags: bytes  # u8[num_blocks]
    owner: bytes  # u16[num_blocks]: `number` of the newest holder, 0 for a free block
    status: Status | None = None  # status, requests and config: all or none
    requests: list[RequestRow] | None = None
    config: ConfigDocument | None = None


BLOCK_ARRAYS = (("live", "<u2"), ("flags", "u1"), ("owner", "<u2"))  # fields of a frame
