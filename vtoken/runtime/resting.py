"""Steps in which nothing can be due: they pass without a plan, and without the tables.

Knows tables and the owner of the blocks; knows neither policies nor relocation. While nothing may
evict and every table is positional, tables say only what the engine's own books say too. A step may
then pass without them; they are caught up, from those books, when somebody reads them. Requests
enter and leave their tables at once, never late.

Invariants:
1. active => when the newest step began nothing could evict, every table was positional, no
   operation was pending and no policy read a signal (`Runtime.begin_step`)
2. behind => all_positional: only positional tables are caught up
3. not all_positional => some request that holds a block has evicted something, or is about to
4. whoever reads `tables` finds them as if every step had been committed
"""

from __future__ import annotations

from collections.abc import Callable

from vtoken.errors import InvariantViolation
from vtoken.runtime.block_store import BlockStore
from vtoken.tables.token_tables import TokenTables


class Resting:
    """Whether the runtime rests, and the tables that resting steps leave behind.

    `active`: nothing can be due in the newest step. `all_positional`: no request that holds a block
    has evicted anything. A violation that catching up finds goes to `violated`.
    """

    def __init__(
        self,
        tables: TokenTables,
        store: BlockStore,
        violated: Callable[[InvariantViolation], None],
    ) -> None:
        self._tables = tables
        self._store = store
        self._violated = violated
        self._behind = False  # steps have passed that `_tables` do not know
        self.active = False
        self.all_positional = True

    @property
    def tables(self) -> TokenTables:
        """The tables as the newest step left them, whoever asks and whenever."""
        if self._behind:
            self.catch_up()
        return self._tables

    def catch_up(self) -> None:
        """Enter what grew in steps that passed without the tables, if any did."""
        if not self._behind:
            return
        self._behind = False
        try:
            self._tables.catch_up(self._store.progress)
        except InvariantViolation as violation:
            self._violated(violation)

    def begin_step(self, *, can_be_due: bool) -> bool:
        """A step begins. Whether the runtime begins to rest with it."""
        begins = not can_be_due and not self.active
        self.active = not can_be_due
        if can_be_due:
            self.catch_up()
        return begins

    def pass_step(self) -> None:
        """The step passes without the tables. Requires `active`, and that it admitted nobody."""
        self._behind = True

    def note_eviction(self) -> None:
        """Tokens are about to die: from now on some table is not positional."""
        self.all_positional = False

    def release(self, request_id: str) -> None:
        """The request lets go of its blocks. Its table need not know the steps that passed."""
        self._tables.release(request_id)
        if not self.all_positional:
            self.all_positional = not any(table.virtual for table in self._tables)

    def check(self) -> None:
        """Verify that `all_positional` is true when it says so; raises InvariantViolation."""
        if self.all_positional and any(table.virtual for table in self.tables):
            raise InvariantViolation("I4", "a request has evicted something, and none is known to")
