"""Admission: how many blocks a waiting request must find free, by what it will hold after eviction.

Knows the runtime's state, not the engine's queue: whoever admits asks `extra_blocks` and
`peak_tokens`, and tells `admitted`. With S the block size, L = budget + interval, a request of P
tokens to compute and T at most in all needs at its peak

  prompt:  min(P, L + chunk) where tokens die between the chunks of the prompt, else P
  output:  min(T, L + 1) where eviction runs while it decodes, else T - P + what the prompt keeps

tokens. Invariant: the blocks that running requests may still take on the way to their peaks, and
the headroom for relocation, stay free when a further request is admitted. So nothing that runs is
preempted to make room for what was admitted later, as long as reclamation keeps up. A request that
evicts nothing is counted as vLLM does, by its prompt alone. An idle pool admits whatever fits it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.config.values import VTokenConfig
from vtoken.runtime.state import RuntimeState
from vtoken.tables.token_table import TokenTable

ASKED_STEPS = 8


@dataclass(slots=True)
class Arrival:
    """A request that is known to the engine. `max_tokens`: prompt and output at most."""

    num_prompt_tokens: int
    max_tokens: int


class Admission:
    """Counts what admitted requests may still take."""

    def __init__(self, state: RuntimeState, max_chunk_tokens: int) -> None:
        self._state = state
        self.max_chunk_tokens = max_chunk_tokens
        self._arrivals: dict[str, Arrival] = {}
        self._outstanding: tuple[int, int] = (-1, 0)  # step, blocks
        self._admitted_step = -1
        self._lacking: tuple[int, int, int] = (-ASKED_STEPS, 0, 0)  # step, blocks, withheld

    def announce(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        self._arrivals[request_id] = Arrival(num_prompt_tokens, max_tokens)

    def resumes(self, request_id: str, num_tokens: int) -> None:
        """A preempted request will compute `num_tokens` again before it decodes."""
        arrival = self._arrivals.get(request_id)
        if arrival is not None:
            arrival.num_prompt_tokens = num_tokens

    def forget(self, request_id: str) -> None:
        self._arrivals.pop(request_id, None)

    def peak_tokens(self, request_id: str, num_tokens: int, num_cached: int = 0) -> int:
        """Tokens that must find places before it may start.

        `num_tokens`: its prompt, as vLLM counts; `num_cached` of them are found in the prefix cache
        and held as a whole until the first chunk has been computed.
        """
        rules = self._state.rules(request_id)
        return self._prompt_peak(rules, num_tokens, num_cached)

    def extra_blocks(self, request_id: str, num_tokens: int) -> int:
        """Free blocks that must be left when `request_id` has taken those of `num_tokens`."""
        config = self._state.config
        idle = not self._state.requests and self._admitted_step != self._state.step
        if config.admission == "stock" or config.reclamation != "auto":
            return 0
        if idle or not self._state.may_evict:
            return 0
        growth = max(0, self._peak_blocks(request_id) - self._blocks(num_tokens))
        return growth + self._outstanding_blocks() + config.headroom_blocks

    def asked(self, num_blocks: int, *, withheld_blocks: int = 0, compressed: bool = True) -> None:
        """A waiting request needs `num_blocks` free ones beside `withheld_blocks`, which the engine
        keeps from it. What is missing is told, and opens the gates where blocks are withheld or it
        waits for what others will hold (`compressed`)."""
        state = self._state
        missing = max(0, num_blocks + withheld_blocks - state.store.num_free_blocks())
        step, most, _ = self._lacking
        if step != state.step or missing > most:
            self._lacking = state.step, missing, withheld_blocks
        if missing and (compressed or withheld_blocks):
            state.want_blocks(missing + withheld_blocks)

    @property
    def lacking_blocks(self) -> int:
        """What the request that waits first lacked when it was last asked for.

        The engine does not ask in every step, in one that preempts for instance; what it found is
        true for `ASKED_STEPS`.
        """
        step, blocks, _ = self._lacking
        return blocks if self._state.step - step <= ASKED_STEPS else 0

    @property
    def withheld_blocks(self) -> int:
        """Free blocks that were kept from that request."""
        return self._lacking[2] if self.lacking_blocks else 0

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
        """Most tokens that are live at once while a prompt of `num_tokens` is computed."""
        whole = rules.evict_during == "decode" or rules.policy.profiles  # it profiles whole prompts
        if whole or not self._compresses(rules):
            return num_tokens
        chunk = self.max_chunk_tokens
        late = 0 if rules.policy.reads is None else self._state.report_lag_steps
        return min(num_tokens, max(self._limit(rules), num_cached + late * chunk) + chunk)

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
