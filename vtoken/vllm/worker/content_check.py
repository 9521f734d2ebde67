"""The worker's side of the content check (I1): hash sampled relocations before and after.

Of sampled victims it keeps a hash until their tokens come back or their host slot is used again.

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


class ContentCheck:
    """One worker's check; `contents` reads K and V of slots [n], layer by layer."""

    def __init__(self, contents: Contents, block_size: int) -> None:
        self._contents = contents
        self._block_size = block_size
        self._before: dict[str, Fingerprint] = {}
        self._parked: dict[int, bytes] = {}  # by host slot

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
        if self._before or len(plan.checked_hosts):
            report.verify_us += (time.perf_counter_ns() - started) // 1000

    def _note_parked(self, plan: StepPlan) -> None:
        for host in plan.park_hosts.tolist() if self._parked else ():
            self._parked.pop(host, None)
        if len(plan.checked_hosts):
            slots = plan.park_slots[np.isin(plan.park_hosts, plan.checked_hosts)]
            hosts = plan.park_hosts[np.isin(plan.park_hosts, plan.checked_hosts)]
            digests = token_digests(self._contents(slots), len(slots))
            self._parked |= zip(hosts.tolist(), digests, strict=True)

    def _compare_restored(self, plan: StepPlan, report: WorkerReport) -> None:
        """Compare what came back with what was parked, where that was hashed."""
        if not self._parked or len(plan.restore_hosts) == 0:
            return
        known = [host in self._parked for host in plan.restore_hosts.tolist()]
        hosts, slots = plan.restore_hosts[known].tolist(), plan.restore_slots[known]
        if not hosts:
            return
        digests = token_digests(self._contents(slots), len(slots))
        wrong = [
            host for host, now in zip(hosts, digests, strict=True) if self._parked[host] != now
        ]
        if wrong and report.violation is None:
            report.violation = f"K/V of {len(wrong)} restored tokens changed in host memory"

    def after(self, plan: StepPlan, mirrors: Mapping[str, Mirror], report: WorkerReport) -> None:
        """Call after the plan is applied to `mirrors` and before the forward; fills `report`."""
        started = time.perf_counter_ns()
        self._compare_restored(plan, report)
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
        if self._before:
            report.verify_us += (time.perf_counter_ns() - started) // 1000
            self._before.clear()


def _agrees(mirror: Mirror, ids: Ints, slots: Ints, num_tokens: int) -> bool:
    """Whether the mirror has exactly `ids` at `slots`, ignoring this step's new tokens."""
    known, places = mirror.live()
    old = known < num_tokens
    return np.array_equal(known[old], ids) and np.array_equal(places[old], slots)
