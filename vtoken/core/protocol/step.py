"""The messages of one step: the scheduler's plan to the worker, and the worker's report.

Plain picklable data, independent of both sides. The scheduler's tables are canonical, the worker
holds mirrors; every plan contains absolute counts by which the worker verifies them.

Order on the worker, one step:
1. victims are copied from `park_slots` to host memory, before anything overwrites them
2. relocations: one gather, then one scatter (destinations are never live, so no copy overwrites a
   slot that is still read)
3. tokens that come back are copied from host memory to `restore_slots`, which nobody reads
4. block tables are replaced by `blocks`, then vLLM appends what it allocated in this step
5. `evicted`, `moved` and `restored` are applied to the mirror, then the step's new tokens go to
   `new_slots`
6. attention reads exactly the `num_live` live tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from vtoken.base.arrays import Bools, Floats, Ints, Ragged
from vtoken.base.compiled import kernel
from vtoken.policies.signals import Signal

NO_IDS: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Retained:
    """The scheduler's view of a relocated request: live ids [n], ascending, and slots [n]."""

    ids: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class Parked:
    """Tokens of a request that a step parks: ids [n] and host slots [n]."""

    ids: Ints
    hosts: Ints


@dataclass(slots=True)
class RequestSteps:
    """The step of the R requests that have evicted something; other requests are not included.

    `num_tokens` [R]: tokens before this step, dead ones included. `num_live` [R] int64 and `dense`
    [R] bool: after this step's new tokens. Per request:

    `evicted`     ids of tokens that died
    `moved_ids`, `moved_slots`   relocated tokens and their new slots; both have the same `starts`
    `restored_ids`, `restored_slots`   tokens that are live again, likewise
    `new_slots`   slots of this step's tokens; none for unscheduled requests
    `scratch`     blocks borrowed for this step, into which attention may pack the request's tokens
                  of partial blocks; none when too few blocks were free

    By name, for some requests only: `blocks`, a rewritten block table before this step's
    allocations; `retained`, the live tokens after a relocation to be verified by content (I1).
    `resumed`: requests that were preempted and go on with tokens from host memory: they have no
    mirror, and of their tokens only the restored ones are live.
    """

    names: list[str] = field(default_factory=list)
    num_tokens: Ints = field(default_factory=lambda: NO_IDS)
    num_live: Ints = field(default_factory=lambda: NO_IDS)
    dense: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    evicted: Ragged = field(default_factory=Ragged.empty)
    moved_ids: Ragged = field(default_factory=Ragged.empty)
    moved_slots: Ragged = field(default_factory=Ragged.empty)
    restored_ids: Ragged = field(default_factory=Ragged.empty)
    restored_slots: Ragged = field(default_factory=Ragged.empty)
    new_slots: Ragged = field(default_factory=Ragged.empty)
    scratch: Ragged = field(default_factory=Ragged.empty)
    blocks: dict[str, Ints] = field(default_factory=dict)
    retained: dict[str, Retained] = field(default_factory=dict)
    resumed: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.names)

    def numbers(self, names: Sequence[str]) -> Ints:
        """The index of each of `names` [B] in the columns, -1 for a request not included."""
        number = dict(zip(self.names, range(len(self)), strict=True))
        return np.fromiter(map(number.get, names, repeat(-1)), np.int64, len(names))

    def writes(self, numbers: Ints, first: Ints) -> Ints:
        """[2, k]: indices of tokens in a batch, and the slots they are written to.

        The tokens of request `numbers[j]` begin at index `first[j]`; -1: not included.
        """
        out = np.empty((2, len(self.new_slots.values)), dtype=np.int64)
        count = _writes(numbers, first, self.new_slots.values, self.new_slots.starts, out)
        return out[:, :count]


@dataclass(slots=True)
class StepPlan:
    """Everything the worker needs for one step.

    `park_slots` [k] are copied to `park_hosts`, and `restore_hosts` [m] to `restore_slots`: host
    slots are numbers below `park_capacity`, the same on every rank. Of
    `checked_parks`, by request, the worker hashes what it parks, and compares whose token it is and
    its hash when it restores it (I1).

    `signals`: the signals that the worker keeps per scheduled request; none for a request without
    an entry. `probed`: requests whose queries are probed in this step, on the layers of their
    signals. `want_scores`: the (request, signal) pairs to report after the step.
    """

    step: int
    source_slots: Ints = field(default_factory=lambda: NO_IDS)
    destination_slots: Ints = field(default_factory=lambda: NO_IDS)
    park_slots: Ints = field(default_factory=lambda: NO_IDS)
    park_hosts: Ints = field(default_factory=lambda: NO_IDS)
    restore_hosts: Ints = field(default_factory=lambda: NO_IDS)
    restore_slots: Ints = field(default_factory=lambda: NO_IDS)
    checked_parks: dict[str, Parked] = field(default_factory=dict)
    park_capacity: int = 0
    requests: RequestSteps = field(default_factory=RequestSteps)
    want_scores: tuple[tuple[str, Signal], ...] = ()
    signals: dict[str, tuple[Signal, ...]] = field(default_factory=dict)
    probed: frozenset[str] = frozenset()

    @property
    def is_compared(self) -> bool:
        """Whether ranks and stages compare it: it evicts, copies, recycles or reads signals."""
        return bool(self.requests or self.copies or self.want_scores)

    @property
    def copies(self) -> bool:
        """Whether the worker copies any token in this step."""
        return bool(len(self.source_slots) or len(self.park_slots) or len(self.restore_slots))


@dataclass(slots=True)
class WorkerReport:
    """The worker's report of step `step`.

    `park_fault`: why the host refused memory for the tokens that the step parks; then none of them
    is copied.
    `packed_tokens`: tokens packed before attention, counted once, and `pack_us` the time over all
    layers; with several ranks, those of the reporting rank, and with several stages the sum of
    their times. `probe_us`: time over all layers of
    probing `probed_queries` single queries, one per request; prompt chunks are not counted, and
    both are 0 where the host does not wait for probes. `scores`: (request, signal) -> float32
    [num_tokens] by token id, higher = keep; shorter than the request if its newest tokens came
    after the last probe.
    """

    step: int
    copy_us: int = 0
    moved_tokens: int = 0
    parked_tokens: int = 0
    restored_tokens: int = 0
    park_us: int = 0
    restore_us: int = 0
    park_fault: str | None = None
    verified_relocations: int = 0
    verify_us: int = 0
    packed_tokens: int = 0
    pack_us: int = 0
    probed_queries: int = 0
    probe_us: int = 0
    violation: str | None = None
    disagreement: str | None = None  # the differing rank or stage, and the difference
    scores: dict[tuple[str, Signal], Floats] = field(default_factory=dict)


@kernel
def _writes(numbers: Ints, first: Ints, slots: Ints, starts: Ints, out: Ints) -> int:
    """out[:, k] = (first[j] + i, slots[starts[r] + i]) for every j with r = numbers[j] >= 0 and
    every i < starts[r + 1] - starts[r], in this order; returns their number, at most the size of
    `out`.
    """
    count = 0
    for j in range(len(numbers)):
        r = numbers[j]
        if r < 0:
            continue
        for i in range(max(0, min(starts[r + 1] - starts[r], out.shape[1] - count))):
            out[0, count], out[1, count] = first[j] + i, slots[starts[r] + i]
            count += 1
    return count
