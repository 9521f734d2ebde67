"""Swapping: a request that loses its blocks to others keeps its tokens in host memory and goes on.

A preempted request loses all its blocks, and the engine computes its context again. Where copying
is cheaper at the measured prices, its live tokens are parked whole instead and restored when it
runs again: nothing is computed twice, and what is dead stays dead.

    preempted   the plan of that step copies its live tokens, before anybody writes to its blocks
    waits       without blocks and without a table; its host slots belong to a `Swapped`
    resumes     the engine allocates places for its live tokens, which are restored to the front of
                these blocks before the forward of that step

While it waits, it is a preempted request of which no token is computed, for the engine too. Only
the step that resumes it counts them as computed. So a swap can be given up at any time: then the
request is computed again, as without swapping, and nothing is lost.

Invariants:
1. every live token of a swapped request has a copy; dead tokens keep theirs
2. a request resumes only after the worker has reported its copies
3. a request that has evicted is never hashed again. One that has not gets its positional layout
   back: the step that hashes its blocks restores them before anything reads them
4. no parked token gives way to a swap; a swap gives way to tokens that would be lost otherwise
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.base.arrays import Bools, Ints
from vtoken.base.errors import InvariantViolation
from vtoken.base.request_ids import short_id
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.held_request import HeldRequest
from vtoken.core.runtime.other_groups import OtherGroups
from vtoken.core.runtime.parking import SWAPPED, Parking
from vtoken.core.runtime.prices import Prices
from vtoken.core.runtime.requests import Requests
from vtoken.core.tables.token_table import TokenTable
from vtoken.sentences import counted

# Why a preempted request is computed again, though host memory is in use: by key, as text.
OBSTACLES = {
    "unsettled": "what of it is computed was not certain",
    "prompt": "its prompt was not computed yet",
    "groups": "other groups of layers cannot be copied",
    "moving": "its tokens were being moved",
    "price": "copying is not known to be cheaper",
    "memory": "host memory was full",
}


@dataclass(slots=True)
class Swapped:
    """A preempted request whose tokens wait in host memory.

    `num_tokens` are computed, dead ones included; `num_restored` of these came back once. The
    tokens `ids` [n], ascending, have copies in `hosts` [n]; `live` [n]: those that were live, which
    are all of the request's. `virtual`: whether it had evicted. `waits`: as in `DueColumns`.
    `step`: the newest of the steps that made the copies.
    """

    held: HeldRequest
    num_tokens: int
    ids: Ints
    hosts: Ints
    live: Bools
    virtual: bool
    num_restored: int
    waits: bool
    priority: int
    step: int

    @property
    def num_live(self) -> int:
        return int(np.count_nonzero(self.live))


@dataclass(eq=False)
class Swapper:
    """The swapped requests of one runtime: `requests`, by id, in the order of their preemptions."""

    _shape: EngineShape
    _store: BlockStore
    _requests: Requests
    _current: CurrentStep
    _prices: Prices
    _parking: Parking
    _others: OtherGroups

    def __post_init__(self) -> None:
        self.requests: dict[str, Swapped] = {}
        self._parking.swaps = self

    # ------------------------------------------------------------ questions

    @property
    def num_tokens(self) -> int:
        """Live tokens of swapped requests."""
        return sum(swapped.num_live for swapped in self.requests.values())

    def num_computed(self, request_id: str) -> int | None:
        """How many tokens of a preempted request need not be computed if it resumes now; None
        while its copies are not reported. 0 if it is not swapped.
        """
        swapped = self.requests.get(request_id)
        if swapped is None:
            return 0
        return swapped.num_tokens if swapped.step <= self._parking.reported_step else None

    def places(self, request_id: str, num_tokens: int) -> int:
        """The places that `num_tokens` tokens in total need of a request without a table."""
        swapped = self.requests.get(request_id)
        if swapped is None:
            return num_tokens
        return num_tokens - swapped.num_tokens + swapped.num_live

    def has_evicted(self, request_id: str) -> bool:
        """Whether a swapped request has evicted something: its blocks are never hashed again."""
        swapped = self.requests.get(request_id)
        return swapped is not None and swapped.virtual

    # ------------------------------------------------------------ a request is preempted

    def obstacle(self, table: TokenTable, *, settled: bool) -> str:
        """Why a request that is preempted now is computed again, a key of `OBSTACLES`; "" if it can
        be swapped. `settled`: the engine knows which of its tokens are computed.
        """
        if table.num_tokens < self._requests.held[table.request_id].prefill_end:
            return "prompt"
        if not settled or not self._current.is_planned:
            return "unsettled"
        if self._others:
            return "groups"
        if table.row in self._current.decisions.moved:
            return "moving"  # the step parks before it moves, so the tokens are not there yet
        num_new = int(np.count_nonzero(table.hosts_of(table.live_ids()) < 0))
        if not self._is_cheaper(table, num_new):
            return "price"
        return "" if self._parking.make_room_for_swap(table.row, num_new) else "memory"

    def _is_cheaper(self, table: TokenTable, num_new: int) -> bool:
        """Whether copying `num_new` tokens out, and all live ones back, takes less time than
        computing the context again; False before that was measured.
        """
        copying = num_new * self._prices.park_us + table.num_live * self._prices.restore_us
        return copying < table.num_tokens * self._prices.prefill_us

    def park(self, table: TokenTable) -> None:
        """Park all of a request that is about to release its blocks, without an `obstacle`."""
        name, slots, tables = table.request_id, self._parking.slots, self._requests.tables
        num_live, hosts = table.num_live, table.hosts_of()
        live = np.zeros(table.num_tokens, dtype=np.bool_)
        live[table.live_ids()] = True
        new = np.flatnonzero(live & (hosts < 0))
        hosts[new] = slots.take(SWAPPED, new, self._current.number)
        self._parking.park_swapped(table, new, hosts[new])
        known = np.setdiff1d(np.flatnonzero(hosts >= 0), new, assume_unique=True)
        slots.row[hosts[known]] = SWAPPED
        tables.drop_copies(np.full_like(known, table.row), known)
        ids, due = np.flatnonzero(hosts >= 0), self._requests.due
        self.requests[name] = Swapped(
            self._requests.held[name],
            table.num_tokens,
            ids,
            hosts[ids],
            live[ids],
            table.virtual,
            table.num_restored,
            bool(due.waits[table.row]),
            int(due.priority[table.row]),
            int(slots.step[hosts[ids]].max(initial=0)),
        )
        self._current.counters.parking.swapped_requests += 1
        self._current.counters.parking.swapped_tokens += num_live

    # ------------------------------------------------------------ it resumes

    def resume(self, request_id: str) -> None:
        """Give a swapped request, which the engine has scheduled, its table again; the step's plan
        restores its live tokens. The store must hold its new blocks.
        """
        swapped, tables = self.requests.pop(request_id), self._requests.tables
        held = swapped.held
        held.retained_dead_blocks, held.compared = frozenset(), None
        held.signals, held.signals_for = {}, None  # the worker keeps none of a preempted request
        self._requests.admit(held)
        table = tables[request_id]
        row, ids = table.row, swapped.ids[swapped.live]
        self._requests.due.waits[row] = swapped.waits
        self._requests.due.in_flight[row] = self._current.number
        tables.start_dead(row, swapped.num_tokens)
        tables.note_copies(row, swapped.ids, swapped.hosts)
        self._parking.slots.row[swapped.hosts] = row
        blocks = self._store.blocks_from(request_id, 0)[: self._shape.blocks_of(len(ids))]
        slots = tables.restore(row, ids, np.arange(len(ids)), np.array(blocks, dtype=np.int64))
        if swapped.virtual:
            self._current.check_private(self._store, blocks, "tokens of a swapped request")
            self._current.decisions.restored[row] = ids, slots
            self._current.decisions.resumed.add(row)
        tables.end_start(row, virtual=swapped.virtual, num_restored=swapped.num_restored)
        self._parking.restore(table, ids, slots, resumed=True)
        self._parking.recheck_forgotten()
        self._parking.note_restored({request_id: len(ids)}, len(blocks), "swap")

    # ------------------------------------------------------------ it is given up

    def discard(self, request_id: str) -> None:
        """The request has ended."""
        swapped = self.requests.pop(request_id, None)
        if swapped is not None:
            self._parking.slots.give_back(swapped.hosts)

    def give_up(self, request_id: str, reason: str) -> None:
        """Let a swapped request be computed again; `reason`: why, as text."""
        swapped = self.requests.get(request_id)
        if swapped is None:
            return
        self.discard(request_id)
        announced = self._requests.announced.get(request_id)
        if announced is not None:
            announced.num_prompt_tokens = swapped.num_tokens + 1
        self._current.note(
            "parking",
            f"{short_id(request_id)} computes {counted(swapped.num_tokens, 'token')} again, which "
            f"waited in host memory: {reason}",
            {"dropped": 0, "reason": reason, "recomputed_tokens": swapped.num_tokens},
        )

    def give_up_all(self, reason: str) -> None:
        """Let all swapped requests be computed again, because `reason`."""
        for request_id in [*self.requests]:
            self.give_up(request_id, reason)

    def lose(self, hosts: Ints, reason: str) -> None:
        """The copies in `hosts` [k] are lost, because `reason`."""
        for request_id, swapped in [*self.requests.items()]:
            if np.isin(swapped.hosts, hosts).any():
                self.give_up(request_id, reason)

    def make_room(self, priority: int, wanted: int) -> int:
        """Free `wanted` host slots or more, if requests that are no more important than `priority`
        have them: the least important first, of these whoever resumes last. Returns how many.
        """
        freed = 0
        able = [pair for pair in self.requests.items() if pair[1].priority >= priority]
        for request_id, swapped in sorted(able, key=lambda pair: -pair[1].priority):
            if freed >= wanted:
                break
            freed += len(swapped.hosts)
            self.give_up(request_id, "host memory is full")
        return freed

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Verify that each swapped request owns its host slots (I5), and has no table."""
        slots, owned = self._parking.slots, 0
        for request_id, swapped in self.requests.items():
            owned += len(swapped.hosts)
            if request_id in self._requests.held:
                raise InvariantViolation("I5", f"{request_id} is swapped and holds blocks")
            wrong = (slots.row[swapped.hosts] != SWAPPED) | (
                slots.token[swapped.hosts] != swapped.ids
            )
            if wrong.any():
                host = swapped.hosts[np.flatnonzero(wrong)[0]]
                raise InvariantViolation("I5", f"host slot {host} is not of {request_id}, swapped")
        if owned != (found := int(np.count_nonzero(slots.row == SWAPPED))):
            raise InvariantViolation(
                "I5", f"{found} host slots are of swapped requests, which have {owned}"
            )
