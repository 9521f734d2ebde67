"""Admission: the free blocks that a waiting request requires, by what it holds after eviction.

Uses the runtime's state, not the engine's queue: the engine's block manager calls `extra_blocks`
and `peak_tokens`, and reports `admitted`. With S the block size and L = budget + interval, a
request with P tokens to compute and at most T in total needs at its peak, in tokens:

  prompt:  min(P, L + chunk) if eviction runs between the chunks of the prompt, else P
  output:  min(T, L + 1) if eviction runs during decoding, else T - P + what the prompt keeps

Invariant: when a request is admitted, the blocks that running requests may still take up to their
peaks stay free, and so does the headroom for relocation. So no running request is preempted for one
admitted later, as long as reclamation keeps up. A request that evicts nothing counts as in vLLM, by
its prompt alone. An idle pool admits any request that fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.config.values import VTokenConfig
from vtoken.runtime.state import RuntimeState
from vtoken.tables.token_table import TokenTable

SHORTAGE_VALID_STEPS = 8


@dataclass(slots=True)
class Arrival:
    """A request known to the engine. `max_tokens`: prompt and output at most."""

    num_prompt_tokens: int
    max_tokens: int


class Admission:
    """Counts the blocks that admitted requests may still take."""

    def __init__(self, state: RuntimeState, max_chunk_tokens: int) -> None:
        self._state = state
        self.max_chunk_tokens = max_chunk_tokens
        self._arrivals: dict[str, Arrival] = {}
        self._outstanding: tuple[int, int] = (-1, 0)  # step, blocks
        self._admitted_step = -1
        # Step, missing blocks, withheld blocks.
        self._shortage: tuple[int, int, int] = (-SHORTAGE_VALID_STEPS, 0, 0)

    def announce(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        self._arrivals[request_id] = Arrival(num_prompt_tokens, max_tokens)

    def preempted(self, request_id: str, num_tokens: int) -> None:
        """A preempted request will compute `num_tokens` again before it decodes."""
        arrival = self._arrivals.get(request_id)
        if arrival is not None:
            arrival.num_prompt_tokens = num_tokens

    def forget(self, request_id: str) -> None:
        self._arrivals.pop(request_id, None)

    def peak_tokens(self, request_id: str, num_tokens: int, num_cached: int = 0) -> int:
        """Tokens that need places before the request may start.

        `num_tokens`: its prompt, as vLLM counts; `num_cached` of them are in the prefix cache and
        all held until the first chunk is computed.
        """
        rules = self._state.rules(request_id)
        return self._prompt_peak(rules, num_tokens, num_cached)

    def extra_blocks(self, request_id: str, num_tokens: int) -> int:
        """Blocks that must stay free after `request_id` takes those of `num_tokens`."""
        config = self._state.config
        idle = not self._state.requests and self._admitted_step != self._state.step
        if config.admission == "stock" or config.reclamation != "auto":
            return 0
        if idle or not self._state.may_evict:
            return 0
        growth = max(0, self._peak_blocks(request_id) - self._blocks(num_tokens))
        return growth + self._outstanding_blocks() + config.headroom_blocks

    def record_demand(
        self, num_blocks: int, *, withheld_blocks: int = 0, compressed: bool = True
    ) -> None:
        """Record that a waiting request needs `num_blocks` free blocks.

        The engine withholds `withheld_blocks` more from it. A shortage also opens the gates if
        blocks are withheld or the request waits for what others will hold (`compressed`).
        """
        state = self._state
        missing = max(0, num_blocks + withheld_blocks - state.store.num_free_blocks())
        step, most, _ = self._shortage
        if step != state.step or missing > most:
            self._shortage = state.step, missing, withheld_blocks
        if missing and (compressed or withheld_blocks):
            state.want_blocks(missing + withheld_blocks)

    @property
    def lacking_blocks(self) -> int:
        """Blocks that the first waiting request lacked when the engine last tried to admit it.

        The engine does not try in every step, for instance after a preemption; a result is valid
        for `SHORTAGE_VALID_STEPS`.
        """
        step, blocks, _ = self._shortage
        return blocks if self._state.step - step <= SHORTAGE_VALID_STEPS else 0

    @property
    def withheld_blocks(self) -> int:
        """Free blocks that were withheld from that request."""
        return self._shortage[2] if self.lacking_blocks else 0

    def admitted(self, request_id: str, num_blocks: int) -> None:
        """`request_id` was admitted in the step being planned and has taken `num_blocks`."""
        self._admitted_step = self._state.step
        if self._state.may_evict:
            growth = max(0, self._peak_blocks(request_id) - num_blocks)
            self._outstanding = self._state.step, self._outstanding_blocks() + growth

    def _outstanding_blocks(self) -> int:
        step, blocks = self._outstanding
        if step != self._state.step:
            blocks = sum(map(self._growth, self._state.tables))
            self._outstanding = self._state.step, blocks
        return blocks

    def _growth(self, table: TokenTable) -> int:
        return max(0, self._peak_blocks(table.request_id) - table.num_blocks)

    def _peak_blocks(self, request_id: str) -> int:
        arrival = self._arrivals.get(request_id)
        rules = self._state.rules(request_id)
        if arrival is None or not self._compresses(rules):
            return 0
        limit = self._limit(rules)
        request = self._state.requests.get(request_id)
        prompt = arrival.num_prompt_tokens if request is None else request.prefill_end
        table = self._state.tables.get(request_id)
        prefilling = table is None or table.num_tokens < prompt
        tokens = self._prompt_peak(rules, prompt) if prefilling else 0
        if rules.evict_during == "prefill":
            kept = prompt if prompt <= limit else rules.budget_tokens
            tokens = max(tokens, kept + arrival.max_tokens - prompt)
        else:
            tokens = max(tokens, min(arrival.max_tokens, limit + 1))
        return self._blocks(tokens)

    def _prompt_peak(self, rules: VTokenConfig, num_tokens: int, num_cached: int = 0) -> int:
        """The most tokens live at once while a prompt of `num_tokens` is computed."""
        # A policy that profiles needs the entire prompt.
        keeps_prompt = rules.evict_during == "decode" or rules.policy.profiles
        if keeps_prompt or not self._compresses(rules):
            return num_tokens
        chunk = self.max_chunk_tokens
        lag = 0 if rules.policy.reads is None else self._state.report_lag_steps
        return min(num_tokens, max(self._limit(rules), num_cached + lag * chunk) + chunk)

    def _compresses(self, rules: VTokenConfig) -> bool:
        return (
            rules.admission == "compressed"
            and rules.evicts
            and rules.reclamation == "auto"
            and rules.policy not in self._state.suspended
        )

    def _limit(self, rules: VTokenConfig) -> int:
        return rules.budget_tokens + rules.interval_tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._state.geometry.block_size)
