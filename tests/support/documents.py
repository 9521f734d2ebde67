"""Documents of the real core with one request of 16 tokens, for tests to change."""

from __future__ import annotations

from typing import Any

from tests.support.core.live import make_quiet
from vtoken import wire


def _documents() -> tuple[wire.Describe, wire.Frame]:
    with make_quiet(model="scripted") as live:
        live.admit("r", 16)
        live.steps()
        return live.call("describe"), live.controller.frame()


DESCRIBED, FRAME = _documents()
assert FRAME.status is not None
assert FRAME.requests is not None
STATUS, (ROW,) = FRAME.status, FRAME.requests


def hello_of(about: wire.Describe, **fields: Any) -> wire.Hello:
    """The first message of a stream of that engine; `fields` are those of the message."""
    names = ("vtoken_version", "vllm_version", "model", "device", "geometry", "policies")
    told = {name: getattr(about, name) for name in names}
    more = {"schema": wire.SCHEMA_VERSION, "topics": [], "fps": 10.0, "can_control": True}
    return wire.Hello(**told | more | fields)
