"""What the runtime remembers of a request beside its token table.

Knows neither what policies do nor blocks of other requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vtoken.arrays import Floats, Ints
from vtoken.config.values import VTokenConfig
from vtoken.planning.gates import DEFERRALS
from vtoken.policies import Policy
from vtoken.policies.signals import Signal
from vtoken.runtime.wasted_moves import LastMoves


@dataclass(slots=True)
class SignalState:
    """A signal that the worker keeps for a request, and its newest answer."""

    signal: Signal
    reader: Policy  # who acts by it, or else shadows who does
    asking: bool = False  # the worker was asked to tell it in the newest step,
    asked_from: int = 0  # and in every step since this one
    scores: Floats | None = None  # the newest answer, by token id
    scores_step: int = 0  # step of the report that `scores` came with


@dataclass(frozen=True, slots=True)
class ShadowComparison:
    """What died of a request in one eviction, beside what the shadow would have evicted.

    `victims`, `chosen`: ascending ids. `num_dead`: dead tokens of the request after it, so that a
    later eviction that was not compared is noticed.
    """

    policy: Policy  # the shadow
    step: int
    num_tokens: int
    num_dead: int
    victims: Ints
    chosen: Ints


@dataclass(slots=True)
class RequestState:
    """One admitted request; reset as a whole when it is preempted. One part writes each field.

    `retained_dead_blocks`: all-dead blocks that are held because other requests hold them too
    (`skip`).
    """

    request_id: str
    num_prompt_tokens: int
    prefill_end: int  # tokens to compute before the first decode step; a resumed one has more
    seed: int
    admitted_step: int
    # Evictor
    retained_dead_blocks: frozenset[int] = frozenset()
    # Relocator
    in_flight_step: int = 0  # step of the newest relocation that was not reported yet
    moved_tokens: int = 0
    last_moves: LastMoves | None = None  # made by the first relocation
    # Scoring: what its policy reads, and the shadow where it reads another one; for which rules
    signals: dict[Signal, SignalState] = field(default_factory=dict)
    signals_for: tuple[VTokenConfig, Policy | None] | None = None
    # PolicyRunner
    profiles: dict[Policy, Any] = field(default_factory=dict)  # who profiled it: what came of it
    compared: ShadowComparison | None = None  # the newest eviction at which the shadow was asked

    def scores_of(self, signal: Signal) -> Floats | None:
        """The newest answer about `signal`, by token id; None while there is none."""
        asked = self.signals.get(signal)
        return None if asked is None else asked.scores


@dataclass(slots=True)
class Counters:
    """Cumulative since the engine started; every part of the runtime adds to its own.

    `deferrals` [len(DEFERRALS)]: steps at which an automatic round was held back from a gain. A
    closed gate, the first one, counts while some request with holes holds more blocks than
    ceil((live + 1) / S), what its live tokens and the next one need. `headroom`: a round ran and
    lacked fresh blocks for a plan. `in_flight`: a round found nothing, as relocations of requests
    that hold too much had not been reported yet. Steps that run operations do not count.
    """

    evicted_tokens: int = 0
    generated_tokens: int = 0
    relocations: int = 0
    moved_tokens: int = 0
    reclaimed_blocks: int = 0
    relocation_freed_blocks: int = 0
    moved_then_evicted_tokens: int = 0
    recycled_slots: int = 0
    deferred_rounds: int = 0
    deferrals: list[int] = field(default_factory=lambda: [0] * len(DEFERRALS))
    shared_skipped_blocks: int = 0
    shared_released_blocks: int = 0
    shared_copied_blocks: int = 0
    shared_copied_tokens: int = 0
    shared_freed_blocks: int = 0
    preemptions: int = 0
    finished_requests: int = 0
    commits_checked: int = 0
    violations: int = 0
    verified_relocations: int = 0
    verify_us: int = 0
    copy_us: int = 0
    plan_us: int = 0
    packed_tokens: int = 0
    pack_us: int = 0
    preempted_per_request: dict[str, int] = field(default_factory=dict)
