"""Requests by the names that their clients know: which one is meant, or why none is.

`vtoken.base.request_ids` says which names a request has. A name that is none may abbreviate one.
It must end within random digits, behind `MIN_RANDOM` of them. Elsewhere it could be the whole id of
another request, as job-1 is the beginning of job-12.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import msgspec

from vtoken.base.errors import RefusedError, UnknownRequestError
from vtoken.base.request_ids import NUM_SHORT, parts_of
from vtoken.wire import MAX_FINISHED

MIN_RANDOM = 4
MAX_NAMED = 8  # candidates in a message


class Match(IntEnum):
    """How a name fits a request, best first; `BEGINS` is too little to mean it."""

    ID = 0
    NAME = 1
    ABBREVIATES = 2
    BEGINS = 3


class NamedRequest(msgspec.Struct):
    """A request that a name fits. `ended`: only what it kept is known."""

    id: str
    ended: bool
    match: Match


def matches(known: Iterable[tuple[str, bool]], name: str) -> list[NamedRequest]:
    """The requests of `known`, each an engine's id and `ended`, that `name` fits best."""
    found: list[NamedRequest] = []
    for request_id, ended in known:
        match = _match(request_id, name)
        if match is not None:
            found.append(NamedRequest(request_id, ended, match))
    return best(found)


def best(found: Sequence[NamedRequest]) -> list[NamedRequest]:
    """Those that the name fits best."""
    match = min((one.match for one in found), default=Match.ID)
    return [one for one in found if one.match == match]


def the_one(found: Sequence[NamedRequest], name: str, *, running: bool = False) -> str:
    """The engine's id of the only request of `found`, which is what `matches` returns.

    `running`: one that has ended is meant only if all have. Raises RefusedError if several are
    meant, UnknownRequestError if none is.
    """
    meant = [one for one in found if one.match != Match.BEGINS]
    if running and len(meant) > 1:
        meant = [one for one in meant if not one.ended] or meant[:1]
    if len(meant) == 1:
        return meant[0].id
    if not meant:
        num_kept = 0 if running else MAX_FINISHED
        raise UnknownRequestError(name, num_kept=num_kept, similar=_listed(found))
    raise RefusedError(
        f"{name!r} names {len(meant):,} requests: {_listed(meant)}",
        field="request_id",
        value=name,
        bound="the id of one of them",
        status=409,
        title="Several requests",
    )


def _match(request_id: str, name: str) -> Match | None:
    if name == request_id:
        return Match.ID
    # Every name is a part of the engine's id, but a sample's short one, which ends like it.
    if not name or (name not in request_id and name[-NUM_SHORT:] != request_id[-NUM_SHORT:]):
        return None
    parts = parts_of(request_id)
    if parts is None:
        return Match.BEGINS if request_id.startswith(name) else None
    if name in parts.names:
        return Match.NAME
    if name == parts.short:
        return Match.ABBREVIATES
    ends = [start + len(name) for start in parts.starts if request_id.startswith(name, start)]
    if not ends:
        return None
    if any(start + MIN_RANDOM <= end < stop for end in ends for start, stop in parts.randoms):
        return Match.ABBREVIATES
    return Match.BEGINS


def _listed(found: Sequence[NamedRequest]) -> str:
    named = [f"{one.id} (finished)" if one.ended else one.id for one in found[:MAX_NAMED]]
    more = [f"{len(found) - MAX_NAMED:,} more"] if len(found) > MAX_NAMED else []
    return ", ".join(named + more)
