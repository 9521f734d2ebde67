"""What travels between scheduler and worker each step: the plan one way, the report back.

Plain data that pickles; knows neither side. The scheduler's tables are canonical, the worker holds
a mirror; every plan carries absolute counts with which the worker verifies that mirror.

Order on the worker, one step:
1. all copies of the step as one gather, then one scatter   (no destination is a source's block-mate
   that somebody still reads: destinations are never live)
2. block tables are replaced by `blocks`, then vLLM appends what it allocated in this step
3. `evicted` and `moved` are applied to the mirror, then the step's new tokens go to `new_slots`
4. attention reads exactly the `num_live` live tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import msgspec
import numpy as np

from vtoken.arrays import Bools, Floats, Ints, Ragged
from vtoken.compiled import kernel
from vtoken.policies.signals import Signal

NO_IDS: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Retained:
    """What the scheduler's table says of a relocated request: ids [n], ascending, and slots [n]."""

    ids: Ints
    slots: Ints


class RequestStep(msgspec.Struct):
    """One request's part of a step, for readers that look at one request; see `RequestSteps`.

    `blocks`: None when the block table was not rewritten.
    """

    num_tokens: int
    evicted: Ints = NO_IDS
    moved_ids: Ints = NO_IDS
    moved_slots: Ints = NO_IDS
    retained: Retained | None = None
    blocks: list[int] | None = None
    new_slots: Ints = NO_IDS
    num_live: int = 0
    dense: bool = True
    scratch: list[int] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class RequestSteps:
    """What happens to the R requests that have evicted something; the others have no part.

    `num_tokens` [R]: tokens before this step, dead ones included. `num_live` [R] int64 and `dense`
    [R] bool: after this step's new tokens. Of each request:

    `evicted`     ids that died
    `moved_ids`, `moved_slots`   relocated tokens, and where to; both have the same `starts`
    `new_slots`   where this step's tokens are written; none for unscheduled requests
    `scratch`     blocks lent for this step, into which attention may pack the request's tokens in
                  partial blocks; none when too few were free

    By name, of some requests only: `blocks`, the block table before this step's allocations where
    it was rewritten; `retained`, the live tokens after a relocation that is to be verified by
    content (I1).
    """

    names: list[str] = field(default_factory=list)
    num_tokens: Ints = field(default_factory=lambda: NO_IDS)
    num_live: Ints = field(default_factory=lambda: NO_IDS)
    dense: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    evicted: Ragged = field(default_factory=Ragged.empty)
    moved_ids: Ragged = field(default_factory=Ragged.empty)
    moved_slots: Ragged = field(default_factory=Ragged.empty)
    new_slots: Ragged = field(default_factory=Ragged.empty)
    scratch: Ragged = field(default_factory=Ragged.empty)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    retained: dict[str, Retained] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def of(self, name: str) -> RequestStep:
        """The part of one request: its arrays are views. KeyError when it has none."""
        if name not in self.names:
            raise KeyError(name)
        i = self.names.index(name)
        return RequestStep(
            int(self.num_tokens[i]),
            self.evicted.of(i),
            self.moved_ids.of(i),
            self.moved_slots.of(i),
            self.retained.get(name),
            self.blocks.get(name),
            self.new_slots.of(i),
            int(self.num_live[i]),
            bool(self.dense[i]),
            self.scratch.of(i).tolist(),
        )

    def numbers(self, names: Sequence[str]) -> Ints:
        """The number here of each of `names` [B], -1 for a request that has no part."""
        number = dict(zip(self.names, range(len(self)), strict=True))
        return np.fromiter(map(number.get, names, repeat(-1)), np.int64, len(names))

    def writes(self, numbers: Ints, first: Ints) -> Ints:
        """[2, k]: tokens of a batch, and the slots that they are written to.

        The tokens of request `numbers[j]` begin at token `first[j]` of the batch; -1: no part.
        """
        out = np.empty((2, len(self.new_slots.values)), dtype=np.int64)
        count = _writes(numbers, first, self.new_slots.values, self.new_slots.starts, out)
        return out[:, :count]

    def parts(self) -> dict[str, RequestStep]:
        """Every request's part; for tests and tools, not for the step."""
        return {name: self.of(name) for name in self.names}

    @classmethod
    def of_parts(cls, parts: Mapping[str, RequestStep]) -> RequestSteps:
        """The columns of `parts`, in their order."""
        each = list(parts.values())
        moved_ids = Ragged.joined(part.moved_ids for part in each)
        moved_slots = Ragged.joined(part.moved_slots for part in each)
        return cls(
            list(parts),
            np.array([part.num_tokens for part in each], dtype=np.int64),
            np.array([part.num_live for part in each], dtype=np.int64),
            np.array([part.dense for part in each], dtype=np.bool_),
            Ragged.joined(part.evicted for part in each),
            moved_ids,
            Ragged(moved_slots.values, moved_ids.starts),
            Ragged.joined(part.new_slots for part in each),
            Ragged.joined(part.scratch for part in each),
            {name: part.blocks for name, part in parts.items() if part.blocks is not None},
            {name: part.retained for name, part in parts.items() if part.retained is not None},
        )


@dataclass(slots=True)
class StepPlan:
    """Everything the worker must know about vToken in one step.

    `signals`: scheduled request -> what the worker keeps for it; a request that is not named keeps
    nothing. `probed`: those of them whose queries are looked at in this step, on the layers of
    their signals. `want_scores`: what is told after the step, of whom.
    """

    step: int
    source_slots: Ints = field(default_factory=lambda: NO_IDS)
    destination_slots: Ints = field(default_factory=lambda: NO_IDS)
    requests: RequestSteps = field(default_factory=RequestSteps)
    probing: bool = False  # some request keeps a signal: `signals` is not empty
    want_scores: tuple[tuple[str, Signal], ...] = ()
    signals: dict[str, tuple[Signal, ...]] = field(default_factory=dict)
    probed: frozenset[str] = frozenset()


@dataclass(slots=True)
class WorkerReport:
    """What the worker says about the step `step`; `verified_tokens`: whose contents were hashed.

    `packed_tokens`: tokens that were packed before attention read, counted once, and `pack_us` what
    that took over all layers; of several ranks, those of the one that reports.
    `probe_us`: what probing `probed_queries` single queries took over all layers, one query a
    request; chunks of prompts are not counted, and both are 0 where the host waits for no probe.
    `scores`: (request, signal) -> numbers [num_tokens] float32 by token id, higher = keep; fewer
    than the request has tokens when the newest came after the last probe.
    """

    step: int
    copy_us: int = 0
    moved_tokens: int = 0
    verified_tokens: int = 0
    verified_relocations: int = 0
    verify_us: int = 0
    packed_tokens: int = 0
    pack_us: int = 0
    probed_queries: int = 0
    probe_us: int = 0
    violation: str | None = None
    disagreement: str | None = None  # tensor parallelism: which rank differs, and in what
    scores: dict[tuple[str, Signal], Floats] = field(default_factory=dict)


@kernel
def _writes(numbers: Ints, first: Ints, slots: Ints, starts: Ints, out: Ints) -> int:
    """out[:, k] = (first[j] + i, slots[starts[r] + i]) for every j with r = numbers[j] >= 0 and
    every i < starts[r + 1] - starts[r], in this order; returns how many those are.

    No more are written than `out` has room for.
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
