"""Admission: the free blocks that a waiting request requires, by what it holds after eviction.

Uses the demand book, not the engine's queue: the engine's block manager calls `requirement` and
`peak_tokens`, and reports `record_demand` and `admitted`.

Invariant: when a request is admitted, the blocks that running requests may still take up to their
peaks stay free, and so does the headroom for relocation. So no running request is preempted for one
admitted later, as long as reclamation keeps up. A request that evicts nothing counts as in vLLM, by
its prompt alone. An idle pool, and one that only sessions hold, admits any request that fits.

Under `evict_when: pressure`, blocks that running requests can still give need not be free: they are
there when a running request grows. What the new request takes at once must be free, so it waits
until others have given that (`shortage`). It asks only for what can be given: a request that does
not fit even then waits for an end, and nobody loses a token for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.demand import DemandBook
from vtoken.core.runtime.requests import Requests

DEMAND_VALID_STEPS = 8


@dataclass(frozen=True, slots=True)
class Requirement:
    """What must be free when a waiting request starts, besides the blocks that it takes.

    `extra_blocks`: this many blocks stay free. `reserves`: whether it leaves blocks to running
    requests and to relocation.
    """

    extra_blocks: int = 0
    reserves: bool = False


NO_REQUIREMENT = Requirement()


@dataclass(frozen=True, slots=True)
class Demand:
    """What the first waiting request lacked when the engine last tried to start it, at `step`.

    `needed_blocks` must be free at once besides the headroom, `withheld_blocks` of them for vLLM's
    watermark. `missing_blocks` were not. `reserves`: as in its `Requirement`.
    """

    step: int
    request_id: str = ""
    needed_blocks: int = 0
    withheld_blocks: int = 0
    missing_blocks: int = 0
    reserves: bool = False


NO_DEMAND = Demand(-DEMAND_VALID_STEPS)


@dataclass(eq=False)
class Admission:
    """Decides what a waiting request must find free."""

    _shape: EngineShape
    _store: BlockStore
    _requests: Requests
    _active: ActiveConfig
    _current: CurrentStep
    _book: DemandBook

    def __post_init__(self) -> None:
        self._demand = NO_DEMAND
        # Of the step being planned: what running requests, and those that it admits, will take
        # until their peaks; what they can give. None until somebody asks.
        self._outstanding: int | None = None
        self._givable: int | None = None
        self._any_admitted = False

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        self._outstanding = self._givable = None
        self._any_admitted = False

    def discard(self, request_id: str) -> None:
        """The request has ended or was admitted: it demands nothing any more."""
        if self._demand.request_id == request_id:
            self._demand = NO_DEMAND

    # ------------------------------------------------------------ the engine asks and reports

    def peak_tokens(self, request_id: str, num_tokens: int, num_cached: int = 0) -> int:
        """Tokens that need places before the request may start.

        `num_tokens`: its prompt, as vLLM counts; `num_cached` of them are in the prefix cache and
        all held until the first chunk is computed.
        """
        rules = self._requests.rules(request_id)
        return self._book.prompt_tokens(rules, num_tokens, num_cached)

    def requirement(self, request_id: str, num_tokens: int, other_blocks: int = 0) -> Requirement:
        """What must be free when `request_id` starts and takes the blocks of `num_tokens`, and
        `other_blocks` in other groups.
        """
        config, own_rules = self._active.config, self._requests.own_rules
        is_alone = all(own_rules(name).session for name in self._requests.held)  # beside sessions
        if (is_alone and not self._any_admitted) or not self.reserves(config):
            return NO_REQUIREMENT
        taken = self._shape.blocks_of(num_tokens) + other_blocks
        growth = max(0, self._book.most_blocks(request_id) - taken)
        future = growth + self._outstanding_blocks() + config.headroom_blocks
        if self._givable is None:
            self._givable = self._book.givable_blocks()
        return Requirement(max(config.headroom_blocks, future - self._givable), reserves=True)

    def record_demand(
        self,
        request_id: str,
        num_blocks: int,
        requirement: Requirement = NO_REQUIREMENT,
        *,
        withheld_blocks: int = 0,
    ) -> None:
        """Record that the waiting `request_id` takes `num_blocks` free blocks under `requirement`.

        The engine withholds `withheld_blocks` more from it. A shortage also opens the gates if
        blocks are withheld or the request waits for what others will hold.
        """
        step, free = self._current.number, self._store.num_free_blocks()
        missing = max(0, num_blocks + requirement.extra_blocks + withheld_blocks - free)
        if self._demand.step != step or missing > self._demand.missing_blocks:
            self._demand = Demand(
                step,
                request_id,
                num_blocks + withheld_blocks,
                withheld_blocks,
                missing,
                reserves=requirement.reserves,
            )
        if missing and (requirement.extra_blocks or withheld_blocks):
            wanted = missing + withheld_blocks
            self._current.wanted_blocks = max(self._current.wanted_blocks, wanted)

    def admitted(self, request_id: str, num_blocks: int) -> None:
        """`request_id` was admitted in the step being planned and has taken `num_blocks` in all
        groups.
        """
        self._any_admitted = True
        self.discard(request_id)
        if self._requests.may_evict:
            growth = max(0, self._book.most_blocks(request_id) - num_blocks)
            self._outstanding = self._outstanding_blocks() + growth

    def _outstanding_blocks(self) -> int:
        if self._outstanding is None:
            self._outstanding = self._book.until_peaks()
        return self._outstanding

    # ------------------------------------------------------------ the first waiting request

    @property
    def demand(self) -> Demand | None:
        """The demand of the first waiting request; None if it lacks nothing.

        The engine does not try in every step, for instance after a preemption; a result is valid
        for `DEMAND_VALID_STEPS`.
        """
        demand = self._demand
        fresh = self._current.number - demand.step <= DEMAND_VALID_STEPS
        return demand if fresh and demand.missing_blocks else None

    def needed_blocks(self, request_id: str, withheld_blocks: int) -> int:
        """Blocks that must be free for a request that waits, `withheld_blocks` included, which the
        engine withholds from it.

        The engine has asked for the first one. The others count with their entire prompts.
        """
        demand, request = self.demand, self._requests.announced.get(request_id)
        if demand is not None and demand.request_id == request_id:
            return demand.needed_blocks
        if request is None or request_id in self._requests.held:
            return 0
        prompt, chunk = request.num_prompt_tokens, self._shape.max_chunk_tokens
        tokens = self.peak_tokens(request_id, prompt) + self._shape.lookahead
        own = self._shape.blocks_of(tokens)
        return own + self._book.most_of_others(prompt, chunk) + withheld_blocks

    def oldest_wait_s(self, now: float) -> float:
        """How long the request that waits longest has waited; 0 if none waits. `now`: monotonic."""
        held = self._requests.held
        since = [
            request.waits_since
            for name, request in self._requests.announced.items()
            if name not in held and not request.is_check
        ]
        return now - min(since, default=now)

    def patience_left_s(self, demand: Demand, now: float, config: VTokenConfig) -> float:
        """How much longer the request of `demand` waits under `config` before others give; at most
        0: not longer.
        """
        request = self._requests.announced.get(demand.request_id)
        if request is None:
            return 0.0
        return request.waits_since + config.evict_after_wait_ms / 1000 - now

    def reserves(self, config: VTokenConfig) -> bool:
        """Whether a waiting request leaves blocks to running ones and to relocation."""
        reclaims = config.reclamation == "auto" and config.experiment.admission != "stock"
        return reclaims and self._requests.may_evict

    def reserved_blocks(self, demand: Demand, config: VTokenConfig, growth_blocks: int) -> int:
        """What the request of `demand` leaves to running ones under `config`, which take
        `growth_blocks` before it is tried again: what they take until their peaks, what it takes
        after its prompt, and the headroom.
        """
        # Without a reservation now, another configuration may make one.
        made = demand.reserves or not self.reserves(self._active.config)
        if not made or not self.reserves(config):
            return growth_blocks
        request = self._requests.announced.get(demand.request_id)
        if request is not None:
            prompt, chunk = request.num_prompt_tokens, self._shape.max_chunk_tokens
            taken = self._shape.blocks_of(prompt) + self._book.most_of_others(prompt, chunk)
            growth_blocks += max(0, self._book.most_blocks(demand.request_id, config) - taken)
        return growth_blocks + self.future_blocks(config)

    def future_blocks(self, config: VTokenConfig) -> int:
        """What running requests will take until their peaks under `config`, and the headroom."""
        if not self.reserves(config):
            return 0
        return self._book.until_peaks(config) + config.headroom_blocks
