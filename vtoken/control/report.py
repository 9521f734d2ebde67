"""Documents about the runtime's state, built on demand: status, rows, blocks, token pages.

Reads the runtime and changes nothing. Facts about the engine come in as `EngineFacts`.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Bools
from vtoken.base.errors import RefusedError, UnknownRequestError
from vtoken.control.diagnosis import Diagnosis
from vtoken.control.facts import EngineFacts
from vtoken.control.memory_pressure import set_givable
from vtoken.control.outlook import Outlook
from vtoken.control.scheduling import Scheduling
from vtoken.control.status import StatusParts
from vtoken.control.text import score_of, text_source
from vtoken.control.waiting import (
    MAX_WAITING_ROWS,
    EmptyQueue,
    QueuedRequest,
    WaitingQueue,
    waiting_row,
)
from vtoken.core.config.spans import covered
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.tables.token_table import TokenTable
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
    RequestState,
    SlotState,
    Status,
    TextPage,
    TextSource,
    TokenPage,
    TokenRow,
)
from vtoken.wire.request_names import NamedRequest, matches, the_one


def _between_turns(queued: QueuedRequest) -> RequestState:
    """The state of a session that holds blocks and does not run."""
    return "idle" if queued.idle else "waiting"


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
        self._queue = EmptyQueue() if queue is None else queue
        self.runtime = runtime
        self.facts = facts
        self.hashed = hashed
        self.scheduling = Scheduling(runtime)
        self._diagnosis = Diagnosis(runtime, facts)

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
            for offset in range(size):
                slot = slots[offset]
                state: SlotState
                if live[offset] >= 0 and slot.state != "live":
                    state = "live"
                elif last[offset] >= 0 and slot.state == "free":
                    state = "dead"
                else:
                    continue
                slots[offset] = BlockSlot(
                    offset=offset,
                    state=state,
                    token_id=int(last[offset]),
                    request_id=table.request_id,
                )
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

    def row(self, table: TokenTable) -> RequestRow:
        runtime, request_id = self.runtime, table.request_id
        state = runtime.state.requests[request_id]
        rules = runtime.state.rules(request_id)
        num_live = table.num_live
        row = RequestRow(  # CPython builds a dict for a call with more than 15 keywords
            id=request_id,
            state="running",
            live=num_live,
            dead=table.num_tokens - num_live,
            prompt_tokens=state.num_prompt_tokens,
            output_tokens=runtime.num_sampled(request_id),
            blocks=table.num_blocks,
            bound_blocks=-(-num_live // table.block_size),
            naive_blocks=table.num_naive_blocks(),
            policy=rules.policy.name,
            budget_tokens=rules.budget_tokens,
            dense=table.dense,
            moved_tokens=state.moved_tokens,
            recycled_slots=table.num_recycled,
            preemptions=runtime.state.preempted.get(request_id, 0),
        )
        row.number = table.number
        row.evict_when = rules.evict_when
        row.given_tokens = state.given_tokens
        row.session = runtime.state.is_session(request_id)
        return row

    def rows(self, outlook: Outlook | None = None) -> list[RequestRow]:
        """Every request that holds blocks, then the first `MAX_WAITING_ROWS` of the queue.
        `outlook`: that of the configuration in force, if it exists already.
        """
        held = {table.request_id: self.row(table) for table in self.runtime.tables}
        rows = [*held.values()]
        set_givable(self.runtime, rows, outlook or self._outlook())
        for queued in self._queue.first(MAX_WAITING_ROWS):
            if queued.request_id in held:
                held[queued.request_id].state = _between_turns(queued)
            else:
                rows.append(waiting_row(self.runtime, queued))
        return rows

    def _outlook(self) -> Outlook:
        return Outlook(self.runtime, self.runtime.config)

    def named(self, name: str) -> list[NamedRequest]:
        """The requests that a client may mean by `name`, which `the_one` chooses from."""
        state = self.runtime.state
        known = dict.fromkeys(state.finished.ids(), True)
        known |= dict.fromkeys(state.request_rules, False)
        return matches(known.items(), name)

    def request(self, name: str) -> RequestDetail:
        """A request that runs or waits, or what a finished one kept.

        Raises RefusedError if `name` means no request, or several.
        """
        request_id = the_one(self.named(name), name)
        queued = self._queue.find(request_id)
        if queued is None and request_id not in self.runtime.tables:
            ended = self.runtime.state.finished.get(request_id)
            if ended is None:
                raise UnknownRequestError(request_id)
            return ended
        if queued is not None and request_id not in self.runtime.state.requests:
            detail = RequestDetail(**msgspec.structs.asdict(waiting_row(self.runtime, queued)))
        else:
            table = self.runtime.tables[request_id]
            detail = RequestDetail(
                **msgspec.structs.asdict(self.row(table)),
                block_table=list(table.blocks),
                block_live=table.block_live().tolist(),
            )
            set_givable(self.runtime, [detail], self._outlook())
            if queued is not None:
                detail.state = _between_turns(queued)
        self.runtime.state.describe_rules(detail)
        return detail

    def living(self, name: str) -> str:
        """The engine's id of the request `name`, which runs or waits.

        Raises RefusedError if there is none, or several.
        """
        request_id = the_one(self.named(name), name, running=True)
        if request_id not in self.runtime.state.request_rules:
            raise UnknownRequestError(request_id, ended=True)
        return request_id

    def num_tokens(self, request_id: str) -> int:
        """The known tokens of a request that runs or waits, computed or not."""
        request = self.runtime.state.requests.get(request_id)
        if request is not None:
            return max(self.runtime.tables[request_id].num_tokens, request.prefill_end)
        queued = self._queue.find(request_id)
        if queued is None:
            raise UnknownRequestError(request_id)
        return queued.num_prompt_tokens + queued.num_output_tokens

    def tokens(self, name: str, start: int, limit: int) -> TokenPage:
        """Rows of the tokens `start` .. `start + limit`, dead ones included.

        A queued request has none, since none of its tokens has a slot.
        """
        request_id = self.living(name)
        table = self.runtime.tables.get(request_id)
        if table is None:
            return TokenPage(
                request_id=request_id, step=self.runtime.step, start=start, total=0, rows=[]
            )
        scores = self.runtime.scoring.newest(request_id)
        ids = np.arange(max(0, start), min(table.num_tokens, start + limit), dtype=np.int64)
        state = self.runtime.state
        protected = state.protection(request_id).covers(ids)
        forgotten = covered(state.forgotten_pairs(request_id), ids) & ~protected
        columns = ids, table.slots_of(ids), protected, forgotten
        rows = []
        for token_id, slot, is_protected, is_forgotten in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            has_slot = slot >= 0
            rows.append(
                TokenRow(
                    token_id=token_id,
                    position=token_id,
                    block=slot // table.block_size if has_slot else None,
                    offset=slot % table.block_size if has_slot else None,
                    live=table.is_live(token_id),
                    score=score_of(scores, token_id),
                    protected=is_protected,
                    forgotten=is_forgotten,
                )
            )
        return TokenPage(
            request_id=request_id,
            step=self.runtime.step,
            start=start,
            total=table.num_tokens,
            rows=rows,
        )

    def text(self, name: str, start: int, limit: int) -> TextSource:
        """Vocabulary ids and states of the tokens `start` .. `start + limit`, dead ones included.

        A queued request has none, as in `tokens`.
        """
        request_id = self.living(name)
        if request_id not in self.runtime.tables:
            page = TextPage(
                request_id=request_id, step=self.runtime.step, start=start, total=0, rows=[]
            )
            return TextSource(page=page, words=[])
        return text_source(self.runtime, request_id, start, limit)

    # ------------------------------------------------------------ status

    def parts(self) -> StatusParts:
        """The parts of the status now."""
        return StatusParts(self.runtime, self.facts, self.scheduling, self._diagnosis, self.rows)

    def status(self) -> Status:
        """The status now; an API process adds its own health (`vtoken_api.service`)."""
        return self.parts().document()
