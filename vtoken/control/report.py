"""Documents about the runtime's state, built on demand: status, rows, blocks, token pages.

Reads the runtime and changes nothing. Facts about the engine come in as `EngineFacts`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Bools
from vtoken.base.errors import RefusedError, UnknownRequestError
from vtoken.control.facts import EngineFacts
from vtoken.control.outlook import Outlook
from vtoken.control.status import EngineStatus, naive_blocks
from vtoken.control.tokens import text_source, token_page
from vtoken.control.waiting import MAX_WAITING_ROWS, EmptyQueue, QueuedRequest, WaitingQueue
from vtoken.core.runtime.request_rows import R, describe_rules, request_row
from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import (
    FLAG_HASHED,
    FLAG_IN_FLIGHT,
    FLAG_NULL,
    FLAG_OTHER,
    FLAG_SHARED,
    FLAG_TAIL,
    BlockDetail,
    BlockOwner,
    BlockSlot,
    Pinned,
    RequestDetail,
    RequestRow,
    Status,
    TextSource,
    TokenPage,
)
from vtoken.wire.request_names import NamedRequest, matches, the_one


class Reporter:
    """Builds wire documents from one runtime.

    `hashed` [N]: which used blocks are in the prefix cache. `queue`: the waiting requests.
    """

    def __init__(
        self,
        runtime: Runtime,
        facts: EngineFacts,
        hashed: Bools,
        queue: WaitingQueue | None = None,
    ) -> None:
        self.runtime = runtime
        self.facts = facts
        self.engine_status = EngineStatus(runtime, facts)
        self.scheduling = self.engine_status.scheduling
        self._queue = EmptyQueue() if queue is None else queue
        self.hashed = hashed

    def status(self, outlook: Outlook | None = None, *, max_age_s: float = 0.0) -> Status:
        """See `EngineStatus.status`."""
        return self.engine_status.status(outlook, max_age_s=max_age_s)

    def outlook(self) -> Outlook:
        """The outlook of the configuration in force, for the documents of one moment."""
        return Outlook(self.runtime, self.runtime.config)

    # ------------------------------------------------------------ blocks

    def live(self) -> npt.NDArray[np.uint16]:
        """Live slots of every block [N], 0 for free ones. Do not write to it."""
        return self.runtime.tables.pool.live.astype("<u2", copy=False)

    def flags(self) -> npt.NDArray[np.uint8]:
        """Flags of every block [N], see `vtoken.wire`."""
        pool = self.runtime.tables.pool
        flags = (pool.usage & self.hashed.view(np.uint8)) * np.uint8(FLAG_HASHED)  # FLAG_USED is 1
        flags |= pool.usage
        if moving := self.runtime.relocator.in_flight_blocks:
            flags[list(moving)] |= FLAG_IN_FLIGHT
        flags[self.runtime.tables.tails()] |= FLAG_TAIL
        for group in self.runtime.other_groups:
            flags[group.block_ids()] |= FLAG_OTHER
        flags[0] = FLAG_NULL  # until now the tail of requests without blocks
        return flags

    def owner(self) -> npt.NDArray[np.uint16]:
        """`RequestRow.number` of every block's newest holder [N], 0 if free. Do not write to it."""
        return self.runtime.tables.owners().astype("<u2", copy=False)

    def block(self, block_id: int) -> BlockDetail:
        runtime = self.runtime
        if not 0 <= block_id < runtime.geometry.num_blocks:
            raise RefusedError(
                f"no block {block_id}",
                field="id",
                value=block_id,
                bound=f"0..{runtime.geometry.num_blocks - 1}",
                status=404,
                title="Unknown block",
            )
        if block_id == 0:
            return BlockDetail(
                id=0, live=0, ref_cnt=0, flags=FLAG_NULL, pinned="null block", owners=[], slots=[]
            )
        size = runtime.geometry.block_size
        owners = []
        slots = [BlockSlot(offset=o, state="free") for o in range(size)]
        for table in runtime.tables:
            if block_id not in table.blocks:
                continue
            index = table.blocks.index(block_id)
            live, last = table.grid()[index], table.written_ids()[index]
            owners.append(
                BlockOwner(request_id=table.request_id, live=int((live >= 0).sum()), index=index)
            )
            for slot, is_live, token_id in zip(
                slots, (live >= 0).tolist(), last.tolist(), strict=True
            ):
                is_news = slot.state == "free" or (is_live and slot.state == "dead")
                if token_id >= 0 and is_news:
                    slot.state = "live" if is_live else "dead"
                    slot.token_id, slot.request_id = token_id, table.request_id
        flags = int(self.flags()[block_id])
        pinned: Pinned
        if flags & FLAG_IN_FLIGHT:
            pinned = "in flight"
        elif flags & FLAG_SHARED:
            pinned = "shared prefix"
        else:
            pinned = "hashed" if flags & FLAG_HASHED else "none"
        return BlockDetail(
            id=block_id,
            live=int(runtime.tables.pool.live[block_id]),
            ref_cnt=len(owners),
            flags=flags,
            pinned=pinned,
            owners=owners,
            slots=slots,
        )

    # ------------------------------------------------------------ requests

    def rows(self, outlook: Outlook | None = None) -> list[RequestRow]:
        """Every request that holds blocks, then the first `MAX_WAITING_ROWS` of the queue.
        `outlook`: that of the configuration in force, if it exists already.
        """
        rows = self._held_rows([*self.runtime.tables.rows], outlook or self.outlook())
        held = {row.id: row for row in rows}
        for queued in self._queue.first(MAX_WAITING_ROWS):
            if queued.request_id in held:
                self._note_wait(held[queued.request_id], queued)
            else:
                rows.append(self._queued_row(RequestRow, queued))
        return rows

    def _held_rows(self, names: Sequence[str], outlook: Outlook) -> list[RequestRow]:
        """The rows of requests that hold blocks."""
        requests, tables = self.runtime.requests, self.runtime.tables
        facts = tables.columns.facts[[tables.rows[name] for name in names]]
        live = facts["num_live"]
        of_tables = {
            "live": live,
            "dead": facts["num_tokens"] - live,
            "blocks": facts["num_blocks"],
            "bound_blocks": -(-live // tables.block_size),
            "naive_blocks": naive_blocks(facts),
            "dense": facts["extent"] == live,
            "recycled_slots": facts["num_recycled"],
            "restored_tokens": facts["num_restored"],
            "parked_tokens": facts["num_parked"],
            "number": facts["number"],
        }
        givable, rows = outlook.givable_of(), []
        for name, *numbers in zip(
            names, *(column.tolist() for column in of_tables.values()), strict=True
        ):
            request = requests.held[name]
            rows.append(
                request_row(
                    RequestRow,
                    requests,
                    name,
                    "running",
                    prompt_tokens=request.num_prompt_tokens,
                    output_tokens=self.runtime.num_sampled(name),
                    moved_tokens=request.moved_tokens,
                    given_tokens=request.given_tokens,
                    givable_tokens=givable.get(name, 0),
                    **dict(zip(of_tables, numbers, strict=True)),
                )
            )
        return rows

    def _queued_row(self, make: type[R], queued: QueuedRequest) -> R:
        """The row of a request that holds no block: its lengths, its rules and its wait."""
        row = request_row(
            make,
            self.runtime.requests,
            queued.request_id,
            queued.state,
            prompt_tokens=queued.num_prompt_tokens,
            output_tokens=queued.num_output_tokens,
        )
        self._note_wait(row, queued)
        return row

    def _note_wait(self, row: RequestRow, queued: QueuedRequest) -> None:
        """Note that a request does not run: since when it waits, and for how many blocks."""
        row.state, request = queued.state, self.runtime.requests.announced.get(row.id)
        if request is not None and row.state != "idle":
            row.waiting_since_ts = request.waiting_since_ts
            withheld = self.facts.withheld_blocks
            row.needed_blocks = self.runtime.admission.needed_blocks(row.id, withheld)

    def named(self, name: str) -> list[NamedRequest]:
        """The requests that a client may mean by `name`, which `the_one` chooses from."""
        known = dict.fromkeys(self.runtime.finished.ids(), True)
        known |= dict.fromkeys(self.runtime.requests.announced, False)
        return matches(known.items(), name)

    def request(self, name: str) -> RequestDetail:
        """A request that runs or waits, or what a finished one kept.

        Raises RefusedError if `name` means no request, or several.
        """
        request_id = the_one(self.named(name), name)
        queued = self._queue.find(request_id)
        table = self.runtime.tables.get(request_id)
        if table is not None:
            (row,) = self._held_rows([request_id], self.outlook())
            detail = RequestDetail(
                **msgspec.structs.asdict(row),
                block_table=list(table.blocks),
                block_live=table.block_live().tolist(),
            )
            if queued is not None:
                self._note_wait(detail, queued)
        elif queued is not None:
            detail = self._queued_row(RequestDetail, queued)
        else:
            ended = self.runtime.finished.get(request_id)
            if ended is None:
                raise UnknownRequestError(request_id)
            return ended
        describe_rules(self.runtime.requests, detail)
        return detail

    def living(self, name: str) -> str:
        """The engine's id of the request `name`, which runs or waits.

        Raises RefusedError if there is none, or several.
        """
        request_id = the_one(self.named(name), name, running=True)
        if request_id not in self.runtime.requests.announced:
            raise UnknownRequestError(request_id, ended=True)
        return request_id

    def num_tokens(self, request_id: str) -> int:
        """The known tokens of a request that runs or waits, computed or not."""
        request = self.runtime.requests.held.get(request_id)
        if request is not None:
            return max(self.runtime.tables[request_id].num_tokens, request.prefill_end)
        queued = self._queue.find(request_id)
        if queued is None:
            raise UnknownRequestError(request_id)
        return queued.num_prompt_tokens + queued.num_output_tokens

    def tokens(self, name: str, start: int, limit: int) -> TokenPage:
        """Rows of the tokens `start` .. `start + limit`, dead ones included."""
        return token_page(self.runtime, self.living(name), start, limit)

    def text(self, name: str, start: int, limit: int) -> TextSource:
        """Vocabulary ids and states of the tokens `start` .. `start + limit`, dead or not."""
        return text_source(self.runtime, self.living(name), start, limit)
