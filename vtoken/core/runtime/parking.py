"""Parking: tokens that leave attention are copied to host memory, so that they can come back.

The scheduler owns the host slots; a worker has only the memory behind them. A host slot holds K and
V of one token in every layer. With `parked_at` of the tables, a token is

    live, without a copy        dead, without a copy: lost
    live, with a copy: clean    dead, with a copy: parked

K and V of a token never change, so a clean token that dies again is parked without another copy.
For everything but this module and `restoring` a parked token is a dead one.

Invariants:
1. a host slot has one owner: row[h] = r and token[h] = t  <=>  parked_at[t] = h in row r      (I5)
2. the worker copies out of a slot in the step in which its token dies, before anything else
3. a token is restored only from a copy whose step the worker has reported
4. tokens that a client named as forgotten have no copy
5. without host memory nothing is copied, and what dies is lost
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vtoken.base.arrays import Bools, Ints, Ragged
from vtoken.base.compiled import kernel
from vtoken.base.errors import InvariantViolation
from vtoken.base.request_ids import short_id
from vtoken.core.config.values import VTokenConfig
from vtoken.core.protocol.step import NO_IDS, Parked, StepPlan, WorkerReport
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.losses import NUM_NAMED
from vtoken.core.runtime.prices import Prices
from vtoken.core.runtime.requests import Requests
from vtoken.core.tables.token_table import TokenTable
from vtoken.sentences import counted
from vtoken.wire import Geometry

# Owners of host slots that are no row.
NOBODY, SWAPPED = -1, -2  # SWAPPED: a request that waits, see `vtoken.core.runtime.swapping`
THRASH_S = 5.0  # a token that dies so soon after its return came back in vain


class HostSlots:
    """Who owns each of the `capacity` host slots: `row` (or `NOBODY`, `SWAPPED`), `token`, the
    `step` of its copy, and when its token `returned_s` last (monotonic; -inf: never).

    The arrays grow with the slots that are used.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.num_used = self.peak = 0
        self._next = 0  # no free slot is below
        self.row: Ints = np.empty(0, dtype=np.int64)
        self.token, self.step = np.empty((2, 0), dtype=np.int64)
        self.returned_s = np.empty(0)

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_used

    def set_capacity(self, capacity: int) -> None:
        """Have `capacity` slots; those that go must be free."""
        self.capacity = capacity
        self._resize(min(capacity, len(self.row)))

    def _resize(self, size: int) -> None:
        kept = min(size, len(self.row))
        self._next = min(self._next, kept)
        for name, unused in (("row", NOBODY), ("token", 0), ("step", 0), ("returned_s", -np.inf)):
            old = getattr(self, name)
            new = np.full(size, unused, dtype=old.dtype)
            new[:kept] = old[:kept]
            setattr(self, name, new)

    def used(self, start: int = 0) -> Ints:
        """The slots from `start` on that a row owns, ascending."""
        return start + np.flatnonzero(self.row[start:] >= 0)

    def owned(self, start: int = 0) -> Ints:
        """The slots from `start` on that have an owner, ascending."""
        return start + np.flatnonzero(self.row[start:] != NOBODY)

    def take(self, row: int, ids: Ints, step: int) -> Ints:
        """Give the lowest free slots to the tokens `ids` [k] of `row`; there must be as many."""
        hosts = np.empty(len(ids), dtype=np.int64)
        if (needed := self.num_used + len(ids)) > len(self.row):
            self._resize(min(self.capacity, 2 * needed))
        self._next = _take_lowest(self.row, self._next, hosts)
        self.row[hosts], self.token[hosts], self.step[hosts] = row, ids, step
        self.returned_s[hosts] = -np.inf
        self.num_used += len(ids)
        self.peak = max(self.peak, self.num_used)
        return hosts

    def give_back(self, hosts: Ints) -> None:
        """Let the slots `hosts` [k] have no owner."""
        if len(hosts):
            self.row[hosts] = NOBODY
            self._next = min(self._next, int(hosts.min()))
            self.num_used -= len(hosts)


@dataclass(slots=True)
class Copies:
    """Tokens that a step copies for one request: their ids, cache slots and host slots [k]."""

    ids: Ints
    slots: Ints
    hosts: Ints


NO_COPIES = Copies(NO_IDS, NO_IDS, NO_IDS)


def joined(parts: Iterable[Copies]) -> Copies:
    """All of them in one."""
    found = [NO_COPIES, *parts]
    return Copies(
        np.concatenate([copies.ids for copies in found]),
        np.concatenate([copies.slots for copies in found]),
        np.concatenate([copies.hosts for copies in found]),
    )


class SwappedRequests(Protocol):
    """Who owns the slots of `SWAPPED`."""

    def lose(self, hosts: Ints, reason: str) -> None:
        """The copies in `hosts` [k] are lost, because `reason`."""

    def make_room(self, priority: int, wanted: int) -> int:
        """Free `wanted` host slots or more, if requests that are no more important than `priority`
        have them; returns how many.
        """


@dataclass(slots=True)
class _Sent:
    """How many tokens the plan of one step parks and restores, `resumed` of these of swapped
    requests, and the requests that restore.
    """

    parked: int
    restored: int
    resumed: int
    restoring: list[str]


@dataclass(eq=False)
class Parking:
    """The host slots of one runtime, and the copies of its steps.

    `fault`: why the host refused memory; "" if it did not. `to_park`, `to_restore`: the copies of
    the step being planned, by request.
    """

    _geometry: Geometry
    _requests: Requests
    _active: ActiveConfig
    _current: CurrentStep
    _prices: Prices
    fault: str = ""
    slots: HostSlots = field(default_factory=HostSlots)
    to_park: dict[str, Copies] = field(default_factory=dict)
    to_restore: dict[str, Copies] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bytes = 0  # `park_bytes` that the capacity was made from
        self._num_forgets = 0
        self._num_resumed = 0  # tokens of swapped requests that the step restores
        self.swaps: SwappedRequests | None = None
        self._sent: dict[int, _Sent] = {}
        self.reported_step = 0  # the newest of the worker's reports
        self._verify_credit = 0.0

    # ------------------------------------------------------------ counts

    @property
    def is_on(self) -> bool:
        """Whether tokens that die now are copied."""
        return self.slots.capacity > 0 and not self.fault

    def parks_under(self, config: VTokenConfig) -> bool:
        """Whether tokens that die under `config` are copied: a host that refused memory is asked
        again once `park_bytes` changes.
        """
        is_refused = self.fault and config.park_bytes == self._bytes
        return self.capacity_of(config.park_bytes) > 0 and not is_refused

    @property
    def num_parked(self) -> int:
        """Dead tokens with a copy."""
        return int(self._requests.tables.columns.num_parked.sum())

    @property
    def num_clean(self) -> int:
        """Live tokens with a copy."""
        return int(self._requests.tables.columns.num_copies.sum()) - self.num_parked

    def capacity_of(self, num_bytes: int) -> int:
        """How many tokens fit `num_bytes` of host memory, over all ranks."""
        return num_bytes // self._geometry.bytes_per_token

    def lost_by(self, num_bytes: int) -> int:
        """Parked tokens that would be lost if `park_bytes` were `num_bytes`."""
        hosts = self.slots.used(self.capacity_of(num_bytes))
        return int(np.count_nonzero(~self._are_live(hosts)))

    def restorable(self, table: TokenTable, step: int) -> Ints:
        """Its parked tokens with copies of steps up to `step`, newest victims first."""
        if not table.num_parked:
            return NO_IDS
        ids = table.parked_ids()
        steps = self.slots.step[table.hosts_of(ids)]
        there = steps <= step
        ids, steps = ids[there], steps[there]
        found: Ints = ids[np.lexsort((ids, steps))[::-1]]
        return found

    # ------------------------------------------------------------ a step

    def begin_step(self) -> None:
        """Take the setting of the new step, and forget the copies of the one before."""
        self.to_park.clear()
        self.to_restore.clear()
        self._num_resumed = 0
        if self._bytes != self._active.config.park_bytes:
            self._bytes = self._active.config.park_bytes
            capacity = self.capacity_of(self._bytes)
            self._drop(self.slots.owned(capacity), "setting")
            self.slots.set_capacity(capacity)
            self.fault = ""
        if self._num_forgets != self._requests.num_forgets:
            self._num_forgets = self._requests.num_forgets
            self._drop_forgotten()

    def park(self, rows: Ints, victims: Ragged) -> int:
        """Park the `victims` of `rows` [k], which have just died, as far as there is host memory.

        Returns how many of them have a copy.
        """
        if not self.is_on:
            return 0
        return sum(self._park(row, victims.of(i)) for i, row in enumerate(rows.tolist()))

    def _park(self, row: int, ids: Ints) -> int:
        table = self._requests.tables.at(row)
        ids = ids[~self._requests.are_forgotten(table.request_id, ids)]
        hosts = table.hosts_of(ids)
        self._count_thrash(hosts[hosts >= 0])
        new = ids[hosts < 0]
        if len(new) > self.slots.num_free:
            self._make_room(row, len(new) - self.slots.num_free)
        fits = min(len(new), self.slots.num_free)
        self._current.counters.parking.dropped_tokens += len(new) - fits
        new = new[len(new) - fits :]
        if fits:
            taken = self.slots.take(row, new, self._current.number)
            self._requests.tables.note_copies(row, new, taken)
            self.to_park[table.request_id] = Copies(new, table.slots_of(new), taken)
        return len(ids) - int(np.count_nonzero(hosts < 0)) + fits

    def make_room_for_swap(self, row: int, num_tokens: int) -> bool:
        """Whether `num_tokens` host slots are free for the request of `row`, which is preempted,
        once clean copies of others are given up. If not, none is.
        """
        missing = num_tokens - self.slots.num_free
        if missing <= 0:
            return True
        hosts = self._droppable(row, live=True)
        hosts = hosts[self.slots.row[hosts] != row]  # it would need them again
        if missing > len(hosts):
            return False
        self._drop(hosts[:missing], "host memory is full")
        return True

    def park_swapped(self, table: TokenTable, ids: Ints, hosts: Ints) -> None:
        """Let the plan copy the tokens `ids` [k] of a request that is preempted to `hosts` [k],
        beside what of it has died in this step.
        """
        request_id = table.request_id
        self.to_restore.pop(request_id, None)
        died = self.to_park.get(request_id, NO_COPIES)
        self.to_park[request_id] = joined([died, Copies(ids, table.slots_of(ids), hosts)])

    def restore(self, table: TokenTable, ids: Ints, slots: Ints, *, resumed: bool = False) -> None:
        """Let the plan copy the tokens `ids` [k] of a request, which are live again, to `slots`.

        `resumed`: it was swapped, and these had not given way.
        """
        hosts = table.hosts_of(ids)
        if resumed:
            self._num_resumed += len(ids)
        else:
            self.slots.returned_s[hosts] = time.monotonic()
        self.to_restore[table.request_id] = Copies(ids, slots, hosts)

    def note_restored(self, restored: dict[str, int], num_blocks: int, reason: str) -> None:
        """Add the event of a step that restores so many tokens, by request, for a `reason` as in
        `EventKind`; they took `num_blocks` blocks.
        """
        total, num_requests = sum(restored.values()), len(restored)
        most = sorted(restored, key=restored.__getitem__, reverse=True)[:NUM_NAMED]
        who = short_id(most[0]) if num_requests == 1 else f"{num_requests:,} requests"
        text = f"{counted(total, 'token')} of {who} came back"
        self._current.note(
            "restored",
            text + (": it goes on" if reason == "swap" else ""),
            {
                "requests": num_requests,
                "tokens": total,
                "blocks": num_blocks,
                "reason": reason,
                "largest": {name: restored[name] for name in most},
            },
        )

    def hand_over(self, plan: StepPlan) -> None:
        """Write the step's copies into the worker's plan."""
        plan.park_capacity = self.slots.capacity
        if not self.to_park and not self.to_restore:
            return
        parked, restored = joined(self.to_park.values()), joined(self.to_restore.values())
        plan.park_slots, plan.park_hosts = parked.slots, parked.hosts
        plan.restore_hosts, plan.restore_slots = restored.hosts, restored.slots
        plan.checked_parks = self._sampled()
        self._sent[plan.step] = _Sent(
            len(parked.hosts), len(restored.hosts), self._num_resumed, [*self.to_restore]
        )

    def _sampled(self) -> dict[str, Parked]:
        """The copies of this step that the worker hashes until their tokens return: an evenly
        spread share `verify_ratio` of the requests that park.
        """
        chosen = {}
        for name, copies in self.to_park.items():
            self._verify_credit += self._active.config.verify_ratio
            if self._verify_credit >= 1.0 - 1e-9:
                self._verify_credit -= 1.0
                chosen[name] = Parked(copies.ids, copies.hosts)
        return chosen

    def finish_step(self, report: WorkerReport | None, step: int) -> str | None:
        """Process the end of `step`. Returns what is wrong with the report's copies, or None."""
        for earlier in [number for number in self._sent if number < step]:
            self._lose(earlier)
        if report is None:
            return self._lose(step)
        sent = self._end(step)
        self.reported_step = step
        counters = self._current.counters.parking
        counters.copied_tokens += report.parked_tokens
        resumed = 0 if sent is None else sent.resumed
        counters.restored_tokens += max(0, report.restored_tokens - resumed)
        counters.park_us += report.park_us
        counters.restore_us += report.restore_us
        if report.park_us:  # a device has none for the first
            self._prices.parks.add(report.park_us, report.parked_tokens)
        if report.restore_us:
            self._prices.restores.add(report.restore_us, report.restored_tokens)
        planned = (0, 0) if sent is None else (sent.parked, sent.restored)
        if report.park_fault is not None:
            self._refused(report.park_fault, step)
            planned = report.parked_tokens, planned[1]
        done = report.parked_tokens, report.restored_tokens
        if done == planned:
            return None
        return f"step {step} parks {planned[0]} and restores {planned[1]} tokens, reported {done}"

    def _lose(self, step: int) -> str | None:
        """No report of `step` has come: nobody knows whether its copies were made."""
        if self._end(step) is None:
            return None
        hosts = self.slots.owned()
        self._drop(hosts[self.slots.step[hosts] == step], "the worker did not report their copies")
        return f"step {step} copies to or from host memory, none was reported"

    def _end(self, step: int) -> _Sent | None:
        """Let the requests that restore in `step` be relocated and restored again."""
        sent = self._sent.pop(step, None)
        for name in [] if sent is None else sent.restoring:
            if self._requests.in_flight_step(name) == step:
                self._requests.due.in_flight[self._requests.tables.rows[name]] = 0
        return sent

    def _refused(self, fault: str, step: int) -> None:
        """The host refused memory: the copies of `step` were not made, and no others are."""
        self.fault = fault
        hosts = self.slots.owned()
        self._drop(hosts[self.slots.step[hosts] >= step], f"refused by the host: {fault}")

    # ------------------------------------------------------------ copies are given up

    def drop_request(self, table: TokenTable) -> None:
        """Give up the copies of a request that releases its blocks, those of the step included."""
        self.to_park.pop(table.request_id, None)
        self.to_restore.pop(table.request_id, None)
        self._free_of(table, table.hosts_of() >= 0)

    def cut(self, rows: Ints, totals: Ints) -> None:
        """Give up the copies of all but the first `totals` [k] tokens of `rows` [k]."""
        for row, total in zip(rows.tolist(), totals.tolist(), strict=True):
            if self._requests.tables.columns.num_copies[row]:
                table = self._requests.tables.at(row)
                has_copy = table.hosts_of() >= 0
                has_copy[:total] = False
                self._free_of(table, has_copy)

    def _drop_forgotten(self) -> None:
        """Give up the copies of tokens that clients have named since."""
        for name in self._requests.forgotten:
            table = self._requests.tables.get(name)
            if table is None or not self._requests.tables.columns.num_copies[table.row]:
                continue
            named = self._requests.are_forgotten(name, np.arange(table.num_tokens))
            self._free_of(table, (table.hosts_of() >= 0) & named)

    def recheck_forgotten(self) -> None:
        """Look for copies of tokens that clients have named, before the next step."""
        self._num_forgets = -1

    def _free_of(self, table: TokenTable, which: Bools) -> None:
        """Give up the copies of the tokens of one request where `which` [T] is set."""
        ids = np.flatnonzero(which)
        if len(ids):
            self._free(table.hosts_of(ids))

    def _free(self, hosts: Ints) -> int:
        """Give up the copies in `hosts` [k]; returns how many of their tokens were parked."""
        rows, ids = self.slots.row[hosts], self.slots.token[hosts]
        self.slots.give_back(hosts)
        return self._requests.tables.drop_copies(rows, ids)

    def _drop(self, hosts: Ints, reason: str) -> None:
        """Give up the copies in `hosts` [k]: those of dead tokens are lost, and swapped requests
        are computed again.
        """
        swapped = self.slots.row[hosts] == SWAPPED
        if self.swaps is not None and swapped.any():
            self.swaps.lose(hosts[swapped], reason)
            hosts = hosts[~swapped]
        if len(hosts) == 0:
            return
        for copies in self.to_park.values():
            kept = ~np.isin(copies.hosts, hosts)
            copies.ids = copies.ids[kept]
            copies.slots, copies.hosts = copies.slots[kept], copies.hosts[kept]
        num_lost = self._free(hosts)
        if num_lost:
            self._current.counters.parking.dropped_tokens += num_lost
            self._current.note(
                "parking",
                f"{counted(num_lost, 'parked token')} lost: {reason}",
                {"dropped": num_lost, "reason": reason},
            )

    def _make_room(self, row: int, wanted: int) -> None:
        """Free up to `wanted` host slots for victims of `row`: of clean tokens first, then of
        swapped requests, which are computed again, then of the oldest parked tokens.
        """
        wanted -= self._drop_for(row, wanted, live=True)
        if self.swaps is not None and wanted > 0:
            wanted -= self.swaps.make_room(int(self._requests.due.priority[row]), wanted)
        if wanted > 0:
            self._drop_for(row, wanted, live=False)

    def _drop_for(self, row: int, wanted: int, *, live: bool) -> int:
        """Give up the copies of up to `wanted` tokens, as `_droppable`; returns how many."""
        hosts = self._droppable(row, live=live)[:wanted]
        self._drop(hosts, "host memory is full")
        return len(hosts)

    def _droppable(self, row: int, *, live: bool) -> Ints:
        """The host slots of tokens, live or parked ones, of requests that are no more important
        than `row`; the least important priority first, of it the oldest copies.
        """
        hosts, priority = self.slots.used(), self._requests.due.priority
        hosts = hosts[priority[self.slots.row[hosts]] >= priority[row]]
        hosts = hosts[self.slots.step[hosts] < self._current.number]
        hosts = hosts[self._are_live(hosts) == live]
        for copies in self.to_restore.values():
            hosts = hosts[~np.isin(hosts, copies.hosts)]  # read in this step
        order = np.lexsort((self.slots.step[hosts], -priority[self.slots.row[hosts]]))
        found: Ints = hosts[order]
        return found

    def _are_live(self, hosts: Ints) -> Bools:
        """Whether the tokens with copies in `hosts` [k] are live [k]."""
        columns = self._requests.tables.columns
        first = columns.first_token[self.slots.row[hosts]]
        live: Bools = columns.arrays.index_of[first + self.slots.token[hosts]] >= 0
        return live

    def _count_thrash(self, hosts: Ints) -> None:
        """Count those of `hosts` [k] whose tokens die soon after their return."""
        soon = self.slots.returned_s[hosts] > time.monotonic() - THRASH_S
        self._current.counters.parking.thrashed_tokens += int(np.count_nonzero(soon))

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Recompute invariant 1; raises InvariantViolation."""
        tables, hosts = self._requests.tables, self.slots.used()
        if (owned := len(self.slots.owned())) != self.slots.num_used:
            raise InvariantViolation(
                "I5", f"{owned} host slots have an owner, counted {self.slots.num_used}"
            )
        num_copies = 0
        for table in tables:
            ids = np.flatnonzero(table.hosts_of() >= 0)
            own = table.hosts_of(ids)
            num_copies += len(ids)
            if len(own) and int(own.max()) >= self.slots.capacity:
                raise InvariantViolation(
                    "I5", f"{table.request_id} has a copy beyond the last slot"
                )
            wrong = (self.slots.row[own] != table.row) | (self.slots.token[own] != ids)
            if wrong.any():
                i = int(np.flatnonzero(wrong)[0])
                raise InvariantViolation(
                    "I5", f"host slot {own[i]} is not owned by token {ids[i]} of {table.request_id}"
                )
        if num_copies != len(hosts):
            raise InvariantViolation(
                "I5", f"{len(hosts)} host slots have an owner, {num_copies} tokens have a copy"
            )


# ---------------------------------------------------------------- kernels


@kernel
def _take_lowest(row: Ints, first: int, out: Ints) -> int:
    """Write the lowest free slots of `row` [capacity] from `first` on to `out` [k]; returns the one
    behind the last.
    """
    found = 0
    at = first
    while found < len(out):
        if row[at] == NOBODY:
            out[found] = at
            found += 1
        at += 1
    return at
