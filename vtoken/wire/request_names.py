"""Requests by the names that their clients know: which one is meant, or why none is.

A server makes the id of an answer from X: the client's `X-Request-Id` or `request_id`, else 16 hex
digits. vLLM makes the engine's id of that one, which ends in 8 random hex digits:

| request | id of its answer | id in the engine |
|---|---|---|
| a chat, or tokens | chatcmpl-X, generate-tokens-X | chatcmpl-X-RANDOM, generate-tokens-X-RANDOM |
| prompt I of a completion | cmpl-X | cmpl-X-I-RANDOM |
| step I of a response | X; without the client's, resp_ and 16 digits | X_I-RANDOM |
| chat I of a batch | chatcmpl-X | chatcmpl-X_I-RANDOM |
| sample K, if there are several | that of its request | K_ and that of its request |

A request's names are these two ids and X. Chats of a batch have the last two only if X is random:
otherwise X_I may be another client's X.

A name that is none may abbreviate one. It must end within random digits, behind `MIN_RANDOM` of
them. Elsewhere it could be the whole id of another request, as job-1 is the beginning of job-12.

`short_id` makes what people see and type: eight characters that abbreviate a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import msgspec

from vtoken.base.errors import RefusedError, UnknownRequestError
from vtoken.wire import MAX_FINISHED

MIN_RANDOM = 4
NUM_SHORT = 8  # characters of a short id
MAX_NAMED = 8  # candidates in a message
_RANDOM = r"-(?P<random>[0-9a-f]{8})"
# 16 hex digits, or a UUID, which has 32.
_DIGITS = re.compile(
    r"(?<![0-9a-z])(?:[0-9a-f]{16}|[0-9a-f]{8}(-?)(?:[0-9a-f]{4}\1){3}[0-9a-f]{12})(?![0-9a-z])",
    re.IGNORECASE,
)
_FORMS = [
    re.compile(form + _RANDOM, re.DOTALL)
    for form in (
        r"(?P<sample>\d+_)?(?P<answer>chatcmpl-(?P<own>[0-9a-f]{16}))(?P<part>_\d+)",
        r"(?P<sample>\d+_)?(?P<answer>(?:chatcmpl|generate-tokens)-(?P<own>.+))(?P<part>)",
        r"(?P<sample>\d+_)?(?P<answer>cmpl-(?P<own>.+))(?P<part>-\d+)",
        r"(?P<sample>)(?P<answer>(?P<own>.+?))(?P<part>_\d+)?",
    )
]


class Match(IntEnum):
    """How a name fits a request, best first; `BEGINS` is too little to mean it."""

    ID = 0
    NAME = 1
    ABBREVIATES = 2
    BEGINS = 3


def short_id(request_id: str) -> str:
    """The engine's id as people see it: at most `NUM_SHORT` characters, which `matches` takes.

    The client's own id if it is as short, its first digits if they are random, and else the
    engine's random digits; with K_ of a sample. An id of another form is whole.
    """
    parts = _parts_of(request_id)
    return request_id if parts is None else parts.short


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
    parts = _parts_of(request_id)
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


class _Parts(NamedTuple):
    """An engine's id, taken apart. `starts`: where a name may begin; `randoms`: random digits."""

    names: tuple[str, str]  # that of its answer and the client's
    short: str
    starts: set[int]
    randoms: list[tuple[int, int]]


@lru_cache(maxsize=4096)  # a name that begins like all ids makes an engine read all of them
def _parts_of(request_id: str) -> _Parts | None:
    form = next(filter(None, (form.fullmatch(request_id) for form in _FORMS)), None)
    if form is None:
        return None
    # Digits without a letter may be a number that its client counted up.
    digits = [d.span() for d in _DIGITS.finditer(request_id) if not d[0].isdecimal()]
    return _Parts(
        names=(form["answer"], form["own"]),
        short=_short(form),
        starts={0, form.start("answer"), form.start("own")},
        randoms=[form.span("random"), *digits],
    )


def _short(form: re.Match[str]) -> str:
    own, part = form["own"], form["part"]
    if form["sample"] or (part or "0").strip("-_") != "0":  # others have this answer too
        return (form["sample"] or "") + form["random"]
    if len(own) <= NUM_SHORT:
        return own
    digits = own.removeprefix("resp_").replace("-", "")
    if _DIGITS.fullmatch(digits) is None or digits.isdecimal():
        return form["random"]
    # vLLM's own, or a UUID of version 4: others begin with the time.
    return digits[:NUM_SHORT] if len(digits) == 16 or digits[12] == "4" else form["random"]


def _listed(found: Sequence[NamedRequest]) -> str:
    named = [f"{one.id} (finished)" if one.ended else one.id for one in found[:MAX_NAMED]]
    more = [f"{len(found) - MAX_NAMED:,} more"] if len(found) > MAX_NAMED else []
    return ", ".join(named + more)
