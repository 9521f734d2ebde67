"""The state of a request that holds blocks, besides its token table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtoken.base.arrays import Floats, Ints
from vtoken.core.config.values import VTokenConfig
from vtoken.policies import Policy
from vtoken.policies.signals import Signal

WASTED_WITHIN_STEPS = 64  # a move is wasted if its token dies so soon
NOT_MOVED = -(1 << 30)


@dataclass(slots=True)
class SignalState:
    """A signal that the worker keeps for a request, and its newest scores.

    The last four are of a signal of keys alone, whose scores are a *reading*.
    """

    signal: Signal
    reader: Policy  # the acting policy if it reads the signal, else the shadow
    requested: bool = False  # in the newest step; of keys, ever
    requested_since: int = 0  # first step of the uninterrupted requests
    scores: Floats | None = None  # the newest ones, by token id
    scores_step: int = 0  # step of the report that `scores` came with
    of_keys: bool = field(init=False)  # read for every request in every step
    asked_step: int = 0  # of the newest reading, and the tokens that it covers
    asked_tokens: int = 0
    live_changes: int = -1  # as in `TokenTable`, in every reading from step `live_since` on
    live_since: int = 0

    def __post_init__(self) -> None:
        self.of_keys = self.signal.of_keys

    def ask(self, step: int, num_tokens: int, live_changes: int) -> None:
        """Note that a reading of keys is asked for in `step`."""
        self.asked_step, self.asked_tokens = step, num_tokens
        if live_changes != self.live_changes:
            self.live_changes, self.live_since = live_changes, step

    def holds(self, num_tokens: int, live_changes: int) -> bool:
        """Whether a reading of keys ranks the tokens that are live now: none has died or come back
        since, and the reader evicts none that is newer.
        """
        return (
            self.scores is not None
            and self.scores_step >= self.live_since
            and live_changes == self.live_changes
            and num_tokens - len(self.scores) <= self.spared_tokens
        )

    @property
    def spared_tokens(self) -> int:
        """How many tokens a reading of keys may lack: as many as the reader spares, less those that
        are neighbours of others.
        """
        radius = self.signal.pool_radius
        return self.reader.recent - (radius + 1 if radius else 0)


@dataclass(frozen=True, slots=True)
class ShadowComparison:
    """The victims of one eviction, and those that the shadow would have chosen.

    `victims`, `chosen`: ascending ids. `live_changes`: as in `TokenTable`, afterwards, by which a
    later eviction without a comparison is detected, and tokens that came back.
    """

    policy: Policy  # the shadow
    step: int
    num_tokens: int
    live_changes: int
    victims: Ints
    chosen: Ints


class LastMoves:
    """The step of each token's newest move, for one request; up to the highest id moved."""

    def __init__(self) -> None:
        self._steps: Ints = np.empty(0, dtype=np.int64)  # by id

    def moved(self, ids: Ints, step: int) -> None:
        """Record that tokens `ids` [n], in any order, are copied before the forward of `step`."""
        known, needed = len(self._steps), int(ids.max(initial=-1)) + 1
        if needed > known:
            steps = np.full(max(needed, 2 * known), NOT_MOVED, dtype=np.int64)
            steps[:known] = self._steps
            self._steps = steps
        self._steps[ids] = step

    def num_recent(self, ids: Ints, step: int) -> int:
        """How many of the tokens `ids` [n] were moved within `WASTED_WITHIN_STEPS` of `step`."""
        known = ids if int(ids.max(initial=-1)) < len(self._steps) else ids[ids < len(self._steps)]
        return int(np.count_nonzero(self._steps[known] >= step - WASTED_WITHIN_STEPS))


@dataclass(slots=True)
class HeldRequest:
    """One admitted request; recreated after a preemption. Each field has one writer.

    `retained_dead_blocks`: all-dead blocks kept because other requests hold them too (`skip`).
    """

    request_id: str
    num_prompt_tokens: int
    prefill_end: int  # tokens to compute before the first decode step; a resumed one has more
    seed: int
    # Evictor
    retained_dead_blocks: frozenset[int] = frozenset()
    given_tokens: int = 0  # died because memory was short
    # Relocator
    moved_tokens: int = 0
    last_moves: LastMoves | None = None  # None until a token was relocated
    # Ranking: what the policy and the shadow read, and what it was set for: rules, shadow, whether
    # the signals are kept at all
    signals: dict[Signal, SignalState] = field(default_factory=dict)
    signals_for: tuple[VTokenConfig, Policy | None, bool] | None = None
    profiles: dict[Policy, Any] = field(default_factory=dict)  # of the prompt, by policy
    compared: ShadowComparison | None = None  # the newest eviction with a shadow

    def scores_of(self, signal: Signal) -> Floats | None:
        """The newest scores of `signal`, by token id; None if there are none yet."""
        state = self.signals.get(signal)
        return None if state is None else state.scores
