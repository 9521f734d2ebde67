"""The typed client of a vToken server: `Client` for scripts, `AsyncClient` for event loops.

    from vtoken.client import Client

    with Client("http://127.0.0.1:8000") as client:
        print(client.status().fragmentation.sentence)

Every call returns a document of `vtoken.wire` or raises ProblemError. numpy, httpx and websockets
are imported on first use.
"""

from vtoken.base.errors import RefusedError, VTokenError
from vtoken.client.asynchronous import AsyncClient
from vtoken.client.errors import (
    NotApplied,
    NotVToken,
    OutcomeUnknown,
    ProblemError,
    StreamClosed,
    StreamGap,
    TLSFailed,
    Unauthorized,
    Unreachable,
)
from vtoken.client.fleet_file import read_fleet
from vtoken.client.request_text import RequestText
from vtoken.client.server import Server
from vtoken.client.stream import AsyncStream, Stream
from vtoken.client.sync import Client

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "NotApplied",
    "NotVToken",
    "OutcomeUnknown",
    "ProblemError",
    "RefusedError",
    "RequestText",
    "Server",
    "Stream",
    "StreamClosed",
    "StreamGap",
    "TLSFailed",
    "Unauthorized",
    "Unreachable",
    "VTokenError",
    "read_fleet",
]
