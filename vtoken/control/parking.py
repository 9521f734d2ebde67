"""What is parked in host memory, what of it would come back, and the call that asks for it.

All but `restore` reads the runtime and changes nothing.
"""

from __future__ import annotations

from msgspec.structs import asdict

from vtoken.core.runtime.restoring import Returns
from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import Parking, Restored


def parking(runtime: Runtime) -> Parking | None:
    """The document of this moment; None while parking is off and nothing is parked."""
    found, slots, counters = runtime.parking, runtime.parking.slots, runtime.counters.parking
    token_bytes = runtime.geometry.bytes_per_token
    capacity = found.capacity_of(runtime.effective[0].park_bytes)
    if not capacity and not slots.num_used:
        return None
    return Parking(
        **asdict(counters) | {"swaps_refused": dict(counters.swaps_refused)},
        capacity_bytes=capacity * token_bytes,
        used_bytes=slots.num_used * token_bytes,
        peak_bytes=slots.peak * token_bytes,
        tokens=found.num_parked,
        clean_tokens=found.num_clean,
        waiting_tokens=runtime.swapper.num_tokens,
        back_tokens=runtime.restorer.back_tokens,
        waits_for=runtime.restorer.waits_for(),
        fault=found.fault,
    )


def restore(runtime: Runtime, request_id: str, *, dry_run: bool) -> Restored:
    """Bring parked tokens of a request back; `dry_run`: only report what would come."""
    table = runtime.tables.get(request_id)
    answer = Restored(
        request_id=request_id,
        parked_tokens=0 if table is None else table.num_parked,
        restorable_tokens=0,
        blocks=0,
        revision=runtime.revision,
    )
    if not answer.parked_tokens:
        answer.notes.append("none of its tokens is parked")
        return answer
    found = runtime.restorer.plan(runtime.config, request_id)
    answer.restorable_tokens, answer.blocks = found.num_tokens, found.num_blocks
    answer.waits_for = found.waits_for
    if not dry_run:
        runtime.restorer.ask(request_id)
    if found.waits_for:
        answer.notes.append(_why(found, runtime.config.reclamation))
    return answer


def _why(found: Returns, reclamation: str) -> str:
    """Why the other parked tokens of a request do not come back now."""
    others = "the others" if found.parts else "they"
    if found.waits_for == "memory":
        return f"{others} come back as soon as memory is free"
    if found.waits_for == "resume":
        return f"they come back once reclamation is resumed: it is {reclamation}"
    return f"{others} exceed its budget, and stay parked"
