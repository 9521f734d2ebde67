"""Tokens parked in host memory, in words: how many came back, and why the others do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken.sentences import counted, data_size

if TYPE_CHECKING:
    from vtoken.wire import Parking, ParkWait

WAITS: dict[ParkWait, str] = {
    "": ", coming back",
    "memory": " until memory is free",
    "time": " for a moment more",
    "resume": " until reclamation is resumed",
    "budget": " beyond the budgets",
}


def back_text(parking: Parking | None) -> str:
    """`1,240 of 1,600 parked tokens are back`; "" unless some came back lately."""
    if parking is None or not parking.back_tokens:
        return ""
    back, of = parking.back_tokens, parking.back_tokens + parking.tokens
    return f"{back:,} of {counted(of, 'parked token')} {'is' if of == 1 else 'are'} back"


def parked_text(parking: Parking | None) -> str:
    """`360 tokens parked until memory is free`; "" if none is."""
    if parking is None or not parking.tokens:
        return ""
    return f"{counted(parking.tokens, 'token')} parked{WAITS[parking.waits_for]}"


def parking_text(parking: Parking) -> str:
    """All of it: what is parked and in how much memory, what came back, and what went wrong."""
    used = f"{data_size(parking.used_bytes)} of {data_size(parking.capacity_bytes)} of host memory"
    restored = f"{parking.restored_tokens:,} came back since the start"
    if parking.thrashed_tokens:
        restored += f", {parking.thrashed_tokens:,} of them gave way again within 5 s"
    swapped = counted(parking.swapped_requests, "preempted request")
    waiting = f"{counted(parking.waiting_tokens, 'token')} of preempted requests wait in it"
    parts = (
        parked_text(parking) or "no token parked",
        f"{used} used",
        waiting if parking.waiting_tokens else "",
        restored,
        f"{swapped} kept in it, not computed again" if parking.swapped_requests else "",
        f"{parking.dropped_tokens:,} lost for want of it" if parking.dropped_tokens else "",
        f"nothing is parked: {parking.fault}" if parking.fault else "",
    )
    return "; ".join(filter(None, parts))
