"""What is parked in host memory, what of it would come back, and the call that asks for it.

All but `restore` reads the runtime and changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import asdict

from vtoken.core.config.values import VTokenConfig
from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import Parking, ParkWait, Restored


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


class Returning(NamedTuple):
    """Parked tokens that come back without a wait as far as memory allows it now, the blocks that
    they take, and why the others do not.
    """

    tokens: int
    blocks: int
    waits_for: ParkWait


def returning(runtime: Runtime, config: VTokenConfig, request_id: str | None = None) -> Returning:
    """What would come back under `config` of one request, or of all."""
    tables, restorer, shape = runtime.tables, runtime.restorer, runtime.shape
    chosen = [tables[request_id]] if request_id is not None else list(tables)
    parked = [table for table in chosen if table.num_parked]
    if not parked:
        return Returning(0, 0, "")
    if config.reclamation != "auto":
        return Returning(0, 0, "resume")
    spare = 0 if restorer.is_short() else max(0, restorer.spare_blocks(config))
    tokens = blocks = lacking = 0
    for table in parked if spare else ():
        wanted = restorer.restorable(config, table.request_id)
        places = len(tables.open_places(table.row, wanted))
        fresh = min(spare - blocks, shape.blocks_of(wanted - places))
        fits = min(wanted, places + fresh * shape.block_size)
        tokens, blocks, lacking = tokens + fits, blocks + fresh, lacking + wanted - fits
    if not spare or lacking:
        return Returning(tokens, blocks, "memory")
    rest = sum(table.num_parked for table in parked) - tokens
    return Returning(tokens, blocks, "budget" if rest else "")


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
    found = returning(runtime, runtime.config, request_id)
    answer.restorable_tokens, answer.blocks, answer.waits_for = found
    if not dry_run:
        runtime.restorer.ask(request_id)
    if found.waits_for:
        answer.notes.append(_why(found, runtime.config.reclamation))
    return answer


def _why(found: Returning, reclamation: str) -> str:
    """Why the other parked tokens of a request do not come back now."""
    others = "the others" if found.tokens else "they"
    if found.waits_for == "memory":
        return f"{others} come back as soon as memory is free"
    if found.waits_for == "resume":
        return f"they come back once reclamation is resumed: it is {reclamation}"
    return f"{others} exceed its budget, and stay parked"
