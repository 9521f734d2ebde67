"""The worker's side of the content check (I1): hash sampled relocations before and after.

Of sampled victims it keeps whose they are and a hash until their host slot is used again.

Before the copies, ids and slots come from the worker's mirror; after them, from the scheduler's
table. So lost, doubled, exchanged and overwritten tokens all change the hash, whichever side is at
fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.core.protocol.integrity import (
    Fingerprint,
    LayerBytes,
    difference,
    fingerprint,
    misplaced,
    token_digests,
)
from vtoken.core.protocol.mirror import Mirror
from vtoken.core.protocol.step import NO_IDS, StepPlan, WorkerReport

Contents = Callable[[Ints], Iterator[LayerBytes]]
TokenOf = tuple[str, int]  # a request and a token id


class ContentCheck:
    """One worker's check; `contents` reads K and V of slots [n], layer by layer."""

    def __init__(self, contents: Contents, block_size: int) -> None:
        self._contents = contents
        self._block_size = block_size
        self._before: dict[str, Fingerprint] = {}
        self._parked: dict[int, tuple[TokenOf, bytes]] = {}  # by host slot, whose it is and a hash

    def before(self, plan: StepPlan, mirrors: Mapping[str, Mirror], report: WorkerReport) -> None:
        """Call before the step's copies, and before its plan is applied to `mirrors`."""
        self._before.clear()
        started = time.perf_counter_ns()
        for request_id in plan.requests.retained:
            ids, slots = mirrors[request_id].live()
            index = plan.requests.names.index(request_id)
            kept = ~np.isin(ids, plan.requests.evicted.of(index))
            self._before[request_id] = fingerprint(ids[kept], self._contents(slots[kept]))
        self._note_parked(plan)
        if self._before or plan.checked_parks:
            report.verify_us += (time.perf_counter_ns() - started) // 1000

    def _note_parked(self, plan: StepPlan) -> None:
        for host in plan.park_hosts.tolist() if self._parked else ():
            self._parked.pop(host, None)
        slot_of = dict(zip(plan.park_hosts.tolist(), plan.park_slots.tolist(), strict=True))
        for name, parked in plan.checked_parks.items():
            hosts = parked.hosts.tolist()
            slots = np.array([slot_of[host] for host in hosts], dtype=np.int64)
            digests = token_digests(self._contents(slots), len(slots))
            for token_id, host, digest in zip(parked.ids.tolist(), hosts, digests, strict=True):
                self._parked[host] = (name, token_id), digest

    def _compare_restored(self, plan: StepPlan, report: WorkerReport) -> bool:
        """Compare what came back with what was parked, where that was hashed; returns whether
        anything was.
        """
        if not self._parked or len(plan.restore_hosts) == 0:
            return False
        known = [host in self._parked for host in plan.restore_hosts.tolist()]
        hosts, slots = plan.restore_hosts[known].tolist(), plan.restore_slots[known]
        if not hosts:
            return False
        digests = token_digests(self._contents(slots), len(slots))
        owner_of = _restored(plan)
        wrong = []
        for host, slot, now in zip(hosts, slots.tolist(), digests, strict=True):
            whose, digest = self._parked[host]
            # A swapped request that had evicted nothing goes on without columns in the plan.
            if digest != now or owner_of.get(slot, whose) != whose:
                wrong.append(host)
        if wrong and report.violation is None:
            report.violation = (
                f"{len(wrong)} restored tokens are others, or have other K/V, than when they were "
                f"parked, the first in host slot {wrong[0]}"
            )
        return True

    def after(self, plan: StepPlan, mirrors: Mapping[str, Mirror], report: WorkerReport) -> None:
        """Call after the plan is applied to `mirrors` and before the forward; fills `report`."""
        started = time.perf_counter_ns()
        has_compared = self._compare_restored(plan, report)
        for request_id, before in self._before.items():
            requests = plan.requests
            num_tokens = int(requests.num_tokens[requests.names.index(request_id)])
            ids, slots = requests.retained[request_id].ids, requests.retained[request_id].slots
            wrong = misplaced(slots, requests.blocks.get(request_id, NO_IDS), self._block_size)
            if wrong is None and not _agrees(mirrors[request_id], ids, slots, num_tokens):
                wrong = "the worker's mirror and the scheduler's table place its tokens differently"
            if wrong is None:
                wrong = difference(before, fingerprint(ids, self._contents(slots)))
            report.verified_relocations += 1
            if wrong is not None and report.violation is None:
                report.violation = f"relocation of {request_id}: {wrong}"
        if has_compared or self._before:
            report.verify_us += (time.perf_counter_ns() - started) // 1000
            self._before.clear()


def _restored(plan: StepPlan) -> dict[int, TokenOf]:
    """Whose token each slot gets from host memory."""
    steps = plan.requests
    return {
        slot: (name, token_id)
        for i, name in enumerate(steps.names)
        for token_id, slot in zip(
            steps.restored_ids.of(i).tolist(), steps.restored_slots.of(i).tolist(), strict=True
        )
    }


def _agrees(mirror: Mirror, ids: Ints, slots: Ints, num_tokens: int) -> bool:
    """Whether the mirror has exactly `ids` at `slots`, ignoring this step's new tokens."""
    known, places = mirror.live()
    old = known < num_tokens
    return np.array_equal(known[old], ids) and np.array_equal(places[old], slots)
