"""What the parts of the runtime share: who owns the blocks, the tables, the configuration.

Knows no engine and takes no decision. Everything that protects KV data is reported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from vtoken.config.request_rules import RequestRules
from vtoken.config.values import VTokenConfig
from vtoken.errors import InvariantViolation
from vtoken.policies import Policy
from vtoken.policies.shadow import ShadowTally
from vtoken.policies.tokenizer_info import Vocabulary
from vtoken.protocol.step import RequestStep
from vtoken.runtime.events import EventLog
from vtoken.runtime.latency import LatencyMeter
from vtoken.runtime.requests import Counters, RequestState
from vtoken.tables.token_table import TokenTable
from vtoken.tables.token_tables import TokenTables
from vtoken.wire import Geometry


class BlockStore(Protocol):
    """Who owns the physical blocks."""

    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""

    def is_writable(self, block: int) -> bool:
        """Whether the sole holder may write it: not shared, no prefix hash."""

    def is_shared(self, block: int) -> bool:
        """Whether two requests or more hold it."""

    def take(self, num_blocks: int) -> list[int]:
        """Allocate fresh private blocks; the caller asked `num_free_blocks` first."""

    def rebind(self, request_id: str, blocks: Sequence[int]) -> None:
        """`blocks` is the request's block table from now on; blocks that left are not freed yet."""

    def lend(self, num_blocks: int) -> list[int]:
        """Up to `num_blocks` free blocks that cache nothing. They stay free: their contents may be
        overwritten during the step being planned, and mean nothing after it."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """One reference fewer for each of `blocks`; unreferenced ones become free."""

    def progress(self, request_id: str, num_known: int) -> tuple[Sequence[int], int]:
        """The blocks of a request beyond the first `num_known`, and its tokens, as they stand.

        Asked only where steps pass without their tables (`Runtime.pass_step`).
        """

    def differences(self, tables: Iterable[TokenTable]) -> list[str]:
        """Where the owner's books differ from `tables`, in words: block tables, reference counts,
        free blocks. For checking; costs as much as the blocks held."""


class Ledger:
    """Tables, request states, counters and events of one block pool, at engine step `step`.

    `report_lag_steps`: how many steps may be with the worker while the next one is planned.
    `config`, of number `revision`, is what the next step takes.
    """

    def __init__(
        self,
        geometry: Geometry,
        store: BlockStore,
        config: VTokenConfig,
        *,
        strict: bool,
        report_lag_steps: int = 0,
    ) -> None:
        self.geometry = geometry
        self.store = store
        self.config = config
        self.revision = 1
        self._taken: tuple[VTokenConfig, int] | None = None  # by the newest step
        self.strict = strict
        self.report_lag_steps = report_lag_steps
        self._tables = TokenTables(geometry.num_blocks, geometry.block_size)
        self._behind = False  # steps have passed that `_tables` do not know
        self.states: dict[str, RequestState] = {}  # of all that have a table
        self.all_positional = True  # none of them has evicted anything
        self.parts: dict[str, RequestStep] = {}  # of the step being planned
        self.own_rules: dict[str, RequestRules] = {}  # of known requests that brought their own
        self.suspended: list[Policy] = []  # those that have failed: nothing dies by them any more
        self.vocabulary: Vocabulary | None = None  # the engine sets it, if it has one
        self.shadow = ShadowTally()
        self.counters = Counters()
        self.events = EventLog()
        self.latency = LatencyMeter()
        self.step = 0
        # What the request that waits first lacked in the last step, and what was kept from it.
        self.wanted_blocks = 0

    @property
    def tables(self) -> TokenTables:
        """The tables as the newest step left them, whoever asks and whenever.

        What grew in steps that passed without them (`Runtime.pass_step`) is entered first.
        """
        if self._behind:
            self.catch_up()
        return self._tables

    def catch_up(self) -> None:
        """Enter what grew in steps that passed without the tables, if any did."""
        if not self._behind:
            return
        self._behind = False
        try:
            self._tables.catch_up(self.store.progress)
        except InvariantViolation as violation:
            self.violated(violation)

    def take_config(self) -> None:
        """A step begins: it runs as a whole with the configuration as it stands."""
        self._taken = self.config, self.revision
        self.shadow.follow(self.config.shadow)

    @property
    def effective(self) -> tuple[VTokenConfig, int]:
        """What the newest step runs with, and its revision.

        While no request holds a block nothing runs, and the configuration is in force at once.
        """
        if self._taken is None or not self.states:
            return self.config, self.revision
        return self._taken

    @property
    def may_evict(self) -> bool:
        """Whether the configuration, or a request's own rules, may evict anything."""
        return self.config.evicts or bool(self.own_rules)

    @property
    def idle(self) -> bool:
        """Whether nothing may evict, and nobody who holds a block has evicted anything."""
        return self.all_positional and not self.may_evict

    def rules(self, request_id: str, config: VTokenConfig | None = None) -> VTokenConfig:
        """The configuration as it holds for one request; `config`: under that one instead."""
        config = self.config if config is None else config
        own = self.own_rules.get(request_id)
        return config if own is None else own.under(config)

    def pending(self, table: TokenTable) -> RequestStep:
        """The request's part of the step being planned."""
        part = self.parts.get(table.request_id)
        if part is None:
            part = self.parts[table.request_id] = RequestStep(table.num_tokens)
        return part

    def rebound(self, table: TokenTable) -> None:
        """The table's block list was rewritten: tell the owner of the blocks and the worker."""
        state = self.states[table.request_id]
        state.readonly &= frozenset(table.blocks)  # a block that left may come back as a fresh one
        self.pending(table).blocks = list(table.blocks)
        self.store.rebind(table.request_id, table.blocks)

    def violated(self, violation: InvariantViolation) -> None:
        """An invariant broke: count it, tell it, and in strict mode stop before a wrong token."""
        self.counters.violations += 1
        self.events.add(
            self.step,
            "violation",
            str(violation),
            {"invariant": violation.invariant, "detail": violation.detail},
        )
        if self.strict:
            raise violation
