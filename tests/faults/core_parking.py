"""Faults in what is copied to host memory and back (I1, I3, I5), and in the return of a token."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.faults.catalogue import Catalogue, Hit
from tests.faults.core import each_plan, swapped, without_firsts
from tests.support.core.harness import CoreEngine
from vtoken.base.arrays import Ragged

PARKING = Catalogue()
# Budgets that rise and fall: tokens are parked and come back all the time.
SWINGS: dict[str, Any] = {
    "num_blocks": 160,
    "budgets": (10, 40),
    "config": {"park_bytes": 1 << 20, "restore_after_ms": 0, "low_watermark_blocks": 0},
}


@PARKING.fault("I1 restored", "wrong contents", **SWINGS)
def restore_another_token(engine: CoreEngine, hit: Hit) -> None:
    """Two tokens come back from each other's host slot."""

    def change(plan: Any) -> bool:
        if len(plan.restore_hosts) < 2:
            return False
        plan.restore_hosts = swapped(plan.restore_hosts)
        return True

    each_plan(engine, change, hit)


@PARKING.fault("I1 restored", "I1, `Runtime.finish_step`", **SWINGS)
def skip_the_gather(engine: CoreEngine, hit: Hit) -> None:
    """Victims count as parked, but nothing is copied."""
    park = engine.worker.park_slots

    def skip(plan: Any) -> int:
        before = dict(engine.worker.host)
        copied = park(plan)
        if copied:
            hit()
        engine.worker.host = before | dict.fromkeys(plan.park_hosts.tolist())
        return copied

    engine.worker.park_slots = skip  # type: ignore[method-assign]


@PARKING.fault("I1 restored", "I1, `Runtime.finish_step`", **SWINGS)
def gather_after_the_relocation(engine: CoreEngine, hit: Hit) -> None:
    """Victims are parked after relocated tokens overwrote them."""
    engine.worker.hole_us, engine.worker.copy_us = 30, 1  # so that relocations pay
    park, copy, held = engine.worker.park_slots, engine.worker.copy_slots, []

    def park_later(plan: Any) -> int:
        held.append(plan)
        return len(plan.park_slots)

    def copy_first(plan: Any) -> None:
        copy(plan)
        overwritten = np.isin(plan.park_slots, plan.destination_slots)
        if overwritten.any():
            hit()
        park(held.pop())

    engine.worker.park_slots = park_later  # type: ignore[method-assign]
    engine.worker.copy_slots = copy_first  # type: ignore[method-assign]


@PARKING.fault("I3 completeness", "I3, `Runtime.finish_step`", **SWINGS)
def lose_a_copy_to_the_host(engine: CoreEngine, hit: Hit) -> None:
    """One copy to host memory is lost."""

    def change(plan: Any) -> bool:
        num_parked = len(plan.park_slots)
        plan.park_slots, plan.park_hosts = plan.park_slots[1:], plan.park_hosts[1:]
        return num_parked > 0

    each_plan(engine, change, hit)


@PARKING.fault("I5 one owner", "I5, `Parking.check`", **SWINGS)
def use_a_host_slot_again(engine: CoreEngine, hit: Hit) -> None:
    """A host slot in use gets a second token."""
    slots = engine.runtime.parking.slots
    take = slots.take

    def take_used(row: int, ids: Any, step: int) -> Any:
        hosts = take(row, ids, step)
        used = np.setdiff1d(slots.used(), hosts)
        if len(used):
            hit()
            hosts[0] = used[0]
            slots.row[hosts[0]], slots.token[hosts[0]] = row, ids[0]
        return hosts

    slots.take = take_used  # type: ignore[method-assign]


@PARKING.fault("mirror", "mirror, `Mirrors._change`", **SWINGS)
def forget_a_return(engine: CoreEngine, hit: Hit) -> None:
    """The plan omits a token that comes back."""

    def change(plan: Any) -> bool:
        requests = plan.requests
        requests.restored_ids, changed = without_firsts(requests.restored_ids)
        requests.restored_slots, _ = without_firsts(requests.restored_slots)
        return changed

    each_plan(engine, change, hit)


@PARKING.fault("mirror", "wrong contents", **SWINGS)
def exchange_returns_in_the_mirror(engine: CoreEngine, hit: Hit) -> None:
    """The plan swaps the places of two tokens that come back."""

    def change(plan: Any) -> bool:
        slots = plan.requests.restored_slots
        firsts = slots.starts[:-1][slots.counts > 1]
        values = slots.values.copy()
        values[firsts], values[firsts + 1] = slots.values[firsts + 1], slots.values[firsts]
        plan.requests.restored_slots = Ragged(values, slots.starts)
        return len(firsts) > 0

    each_plan(engine, change, hit)


@PARKING.fault("write private blocks", "I4, `Restorer._restore`", **SWINGS)
def restore_into_a_cached_block(engine: CoreEngine, hit: Hit) -> None:
    """A token comes back into a hashed block."""
    tables = engine.runtime.tables
    open_places = tables.open_places

    def any_places(row: int, most: int) -> Any:
        table = tables.at(row)
        readonly = tables.columns.arrays.readonly
        first = int(tables.columns.first_block[row] + tables.columns.gap[row])
        own = slice(first, first + table.num_blocks)
        if readonly[own].any():
            hit()
        readonly[own] = False
        return open_places(row, most)

    tables.open_places = any_places  # type: ignore[method-assign]
