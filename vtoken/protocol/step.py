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

from dataclasses import dataclass, field

import msgspec
import numpy as np

from vtoken.arrays import Floats, Ints
from vtoken.policies.signals import Signal

NO_IDS: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Retained:
    """What the scheduler's table says of a relocated request: ids [n], ascending, and slots [n]."""

    ids: Ints
    slots: Ints


class RequestStep(msgspec.Struct):
    """One request's part of a step; only requests that have evicted something have one.

    `num_tokens`: tokens before this step, dead ones included. `evicted` [v] ids that died,
    `moved_ids`/`moved_slots` [m] relocated tokens, `blocks` the block table before this step's
    allocations (None: unchanged), `new_slots` [k] where the step's new tokens are written.
    `num_live`, `dense`: after the new tokens. Unscheduled requests have no new slots.
    `retained`: the live tokens after the relocation, when it is to be verified by content (I1).
    `scratch`: free blocks lent for this step, into which a holey request's `loose_slots` [l] may be
    packed for attention, to be read behind its `full_blocks` [f]; empty when there were too few.
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
    full_blocks: Ints = NO_IDS
    loose_slots: Ints = NO_IDS


@dataclass(slots=True)
class StepPlan:
    """Everything the worker must know about vToken in one step.

    `signals`: scheduled request -> what the worker keeps for it; a request that is not named keeps
    nothing. `probed`: those of them whose queries are looked at in this step. `signal_layers`: the
    layers that signals are taken from. `want_scores`: what is told after the step, of whom.
    """

    step: int
    source_slots: Ints = field(default_factory=lambda: NO_IDS)
    destination_slots: Ints = field(default_factory=lambda: NO_IDS)
    requests: dict[str, RequestStep] = field(default_factory=dict)
    probing: bool = False  # some request keeps a signal: `signals` is not empty
    probe_layers: tuple[int, ...] | None = None  # None: no probe in this step
    want_scores: tuple[tuple[str, Signal], ...] = ()
    signals: dict[str, tuple[Signal, ...]] = field(default_factory=dict)
    probed: frozenset[str] = frozenset()
    signal_layers: tuple[int, ...] = ()


@dataclass(slots=True)
class WorkerReport:
    """What the worker says about the step `step`; `verified_tokens`: whose contents were hashed.

    `packed_tokens`: tokens that were packed before attention read, counted once, and `pack_us` what
    that took over all layers; of several ranks, those of the one that reports.
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
    violation: str | None = None
    disagreement: str | None = None  # tensor parallelism: which rank differs, and in what
    scores: dict[tuple[str, Signal], Floats] = field(default_factory=dict)
