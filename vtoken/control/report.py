"""Documents about the runtime's state, built on demand: status, rows, blocks, token pages.

Reads the runtime and changes nothing. Facts about the engine come in as `EngineFacts`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from vtoken.arrays import Bools
from vtoken.config.spans import covered
from vtoken.control.advice import paused_sentence
from vtoken.control.diagnosis import Diagnosis
from vtoken.control.memory_pressure import ended_detail, memory_pressure, set_givable
from vtoken.control.request_names import named
from vtoken.control.scheduling import Scheduling
from vtoken.control.text import score_of, text_source
from vtoken.control.waiting import MAX_WAITING_ROWS, EmptyQueue, WaitingQueue, waiting_row
from vtoken.errors import RefusedError, UnknownRequestError
from vtoken.policies import params_dict
from vtoken.runtime.given import MAX_FINISHED
from vtoken.runtime.relocation.pricing import NOTHING
from vtoken.runtime.runtime import Runtime
from vtoken.runtime.wasted_moves import WASTED_WITHIN_STEPS
from vtoken.tables.token_table import TokenTable
from vtoken.wire import (
    FLAG_HASHED,
    FLAG_IN_FLIGHT,
    FLAG_SHARED,
    FLAG_TAIL,
    SCHEMA_VERSION,
    BlockCounts,
    BlockDetail,
    BlockOwner,
    BlockSlot,
    Calibration,
    CanaryStatus,
    Invariants,
    Pinned,
    PolicyChoice,
    Reclamation,
    RequestCounts,
    RequestDetail,
    RequestRow,
    RoundPrices,
    SlotState,
    Status,
    TextPage,
    TextSource,
    TokenCounts,
    TokenPage,
    TokenRow,
)


@dataclass(slots=True)
class EngineFacts:
    """Facts about the engine that the runtime does not have."""

    epoch: str
    vtoken_version: str
    vllm_version: str
    model: str
    device: str
    calibration_file: str = ""
    calibration_detail: str = "none was looked for"  # why no profile is loaded
    running: int = 0
    waiting: int = 0
    withheld_blocks: int = 0
    step_ms: float = 0.0


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
        self._diagnosis = Diagnosis(runtime, lambda: facts.waiting)

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
        flags[0] = 0  # the null block, which is the tail of requests without blocks
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
        num_live, num_tokens, num_prompt = table.num_live, table.num_tokens, state.num_prompt_tokens
        row = RequestRow(  # CPython builds a dict for a call with more than 15 keywords
            id=request_id,
            state="running",
            live=num_live,
            dead=num_tokens - num_live,
            prompt_tokens=num_prompt,
            output_tokens=num_tokens - num_prompt if num_tokens > num_prompt else 0,
            blocks=table.num_blocks,
            bound_blocks=-(-num_live // table.block_size),
            naive_blocks=table.num_naive_blocks(),
            policy=rules.policy.name,
            budget_tokens=rules.budget_tokens,
            dense=table.dense,
            moved_tokens=state.moved_tokens,
            recycled_slots=table.num_recycled,
            preemptions=runtime.counters.preempted_per_request.get(request_id, 0),
        )
        row.number = table.number
        row.evict_when = rules.evict_when
        row.given_tokens = state.given_tokens
        return row

    def rows(self) -> list[RequestRow]:
        """Every request that holds blocks, then the first `MAX_WAITING_ROWS` of the queue."""
        rows = [self.row(table) for table in self.runtime.tables]
        set_givable(self.runtime, rows)
        for queued in self._queue.first(MAX_WAITING_ROWS):
            if queued.request_id not in self.runtime.state.requests:
                rows.append(waiting_row(self.runtime, queued))
                continue
            held = next(row for row in rows if row.id == queued.request_id)
            held.state = "waiting"  # a session between two turns
        return rows

    def request(self, request_id: str) -> RequestDetail:
        """A request that runs or waits, or what a finished one kept; also by the id of its answer.

        Raises RefusedError if there is none, or several of that answer.
        """
        state = self.runtime.state
        known = named([*state.request_rules, *state.finished.ids()], request_id)
        if len(known) == 1:
            request_id = known[0]
        elif known:
            raise RefusedError(
                f"the answer {request_id!r} is of {len(known):,} requests: {', '.join(known[:8])}",
                field="request_id",
                value=request_id,
                bound="the id of one of them",
                status=409,
                title="Several requests",
            )
        queued = self._queue.find(request_id)
        if queued is None and request_id not in self.runtime.tables:
            ended = self.runtime.state.finished.get(request_id)
            if ended is None:
                raise UnknownRequestError(request_id, num_kept=MAX_FINISHED)
            return ended_detail(ended)
        if queued is not None and request_id not in self.runtime.state.requests:
            detail = RequestDetail(**msgspec.structs.asdict(waiting_row(self.runtime, queued)))
        else:
            table = self.runtime.tables[request_id]
            detail = RequestDetail(
                **msgspec.structs.asdict(self.row(table)),
                block_table=list(table.blocks),
                block_live=table.block_live().tolist(),
            )
            set_givable(self.runtime, [detail])
            if queued is not None:
                detail.state = "waiting"
        protection = self.runtime.state.protection(request_id)
        detail.protected, detail.protection_cut = protection.spans(), list(protection.cut)
        detail.forgotten = [*self.runtime.state.forgotten.get(request_id, ())]
        return detail

    def num_tokens(self, request_id: str) -> int:
        """The known tokens of a request that runs or waits, computed or not.

        Raises UnknownRequestError; a finished request has none.
        """
        state = self.runtime.state
        request = state.requests.get(request_id)
        if request is not None:
            return max(self.runtime.tables[request_id].num_tokens, request.prefill_end)
        queued = self._queue.find(request_id)
        if queued is not None:
            return queued.num_prompt_tokens + queued.num_output_tokens
        raise UnknownRequestError(request_id, ended=state.finished.get(request_id) is not None)

    def tokens(self, request_id: str, start: int, limit: int) -> TokenPage:
        """Rows of the tokens `start` .. `start + limit`, dead ones included.

        A queued request has none, since none of its tokens has a slot.
        """
        if self._is_queued(request_id):
            return TokenPage(
                request_id=request_id, step=self.runtime.step, start=start, total=0, rows=[]
            )
        table = self._table(request_id)
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

    def text(self, request_id: str, start: int, limit: int) -> TextSource:
        """Vocabulary ids and states of the tokens `start` .. `start + limit`, dead ones included.

        A queued request has none, as in `tokens`.
        """
        if self._is_queued(request_id):
            page = TextPage(
                request_id=request_id, step=self.runtime.step, start=start, total=0, rows=[]
            )
            return TextSource(page=page, words=[])
        self._table(request_id)
        return text_source(self.runtime, request_id, start, limit)

    def _table(self, request_id: str) -> TokenTable:
        """The token table; raises UnknownRequestError, also for a finished request."""
        if request_id in self.runtime.tables:
            return self.runtime.tables[request_id]
        ended = self.runtime.state.finished.get(request_id) is not None
        raise UnknownRequestError(request_id, ended=ended)

    def _is_queued(self, request_id: str) -> bool:
        """Whether the request is in the queue and holds no block."""
        held = request_id in self.runtime.state.requests
        return not held and self._queue.find(request_id) is not None

    # ------------------------------------------------------------ status

    def status(self, rows: list[RequestRow] | None = None) -> Status:
        """The status now. `rows`: those of this step, if they exist already.

        An API process adds its own health (`vtoken_api.service`).
        """
        rows = self.rows() if rows is None else rows
        runtime = self.runtime
        pool = runtime.tables.pool
        config = runtime.config
        counters = runtime.counters
        facts = self.facts
        free = runtime.state.store.num_free_blocks()
        size = runtime.geometry.block_size
        num_low = pool.num_low_utilization()
        pressure = memory_pressure(runtime)
        fragmentation = self._diagnosis.fragmentation(free, num_low, pressure)
        if self.scheduling.state != "running":
            fragmentation.sentence = paused_sentence(
                self.scheduling.state, facts.running, facts.waiting
            )
        return Status(
            schema=SCHEMA_VERSION,
            vtoken_version=facts.vtoken_version,
            vllm_version=facts.vllm_version,
            model=facts.model,
            device=facts.device,
            epoch=facts.epoch,
            step=runtime.step,
            ts=time.time(),
            block_size=size,
            blocks=BlockCounts(
                total=runtime.geometry.num_blocks - 1,
                free=free,
                used=pool.num_used,
                partially_live=pool.num_partially_live(),
                low_utilization=num_low,
                shared=pool.num_shared(),
                headroom=config.headroom_blocks,
                withheld=min(free, facts.withheld_blocks),
            ),
            tokens=TokenCounts(
                live=pool.num_live,
                dead=sum(table.num_dead_slots() for table in runtime.tables),
                evicted=counters.evicted_tokens,
                generated=counters.generated_tokens,
            ),
            fragmentation=fragmentation,
            reclamation=Reclamation(
                state=config.reclamation,
                in_flight=runtime.relocator.num_in_flight_tokens,
                relocations=counters.relocations,
                moved_tokens=counters.moved_tokens,
                moved_bytes=counters.moved_tokens * runtime.geometry.bytes_per_token,
                reclaimed_blocks=counters.reclaimed_blocks,
                recycled_slots=counters.recycled_slots,
                deferred=counters.deferred_rounds,
                deferrals=dict(counters.deferrals),
                copy_us=counters.copy_us,
                plan_us=counters.plan_us,
                held_blocks=sum(row.blocks for row in rows),
                blocks_without_reclaim=sum(row.naive_blocks for row in rows),
                packed_bound_blocks=sum(row.bound_blocks for row in rows),
                shared_skipped_blocks=counters.shared_skipped_blocks,
                shared_released_blocks=counters.shared_released_blocks,
                shared_copied_blocks=counters.shared_copied_blocks,
                shared_copied_tokens=counters.shared_copied_tokens,
                shared_freed_blocks=counters.shared_freed_blocks,
                relocation_freed_blocks=counters.relocation_freed_blocks,
                moved_then_evicted_tokens=counters.moved_then_evicted_tokens,
                payback_steps=WASTED_WITHIN_STEPS,
                packed_tokens=counters.packed_tokens,
                pack_us=counters.pack_us,
            ),
            policy=PolicyChoice(name=config.policy.name, params=params_dict(config.policy)),
            budget_tokens=config.budget_tokens,
            interval_tokens=config.interval_tokens,
            requests=RequestCounts(
                running=facts.running,
                waiting=facts.waiting,
                preempted=counters.preemptions,
                finished=counters.finished_requests,
            ),
            invariants=Invariants(
                checked=counters.commits_checked,
                violations=counters.violations,
                verified_relocations=counters.verified_relocations,
                verify_us=counters.verify_us,
                strict=runtime.state.strict,
                check_every_step=runtime.check_every_step,
            ),
            config_revision=runtime.state.revision,
            step_ms=facts.step_ms,
            latency=runtime.latency.document(time.monotonic()),
            shadow=runtime.state.shadow.document(),
            scheduling=self.scheduling.state,
            paused_since_ts=self.scheduling.since_ts,
            prices=self._prices(),
            budget_ratio=config.budget_ratio,
            budget_floor_tokens=config.budget_floor_tokens,
            calibration=self._calibration(),
            canary=self._canary(),
            pressure=pressure,
        )

    def _calibration(self) -> Calibration:
        """Which layers and heads the current policy's signal uses, and why those."""
        runtime, facts = self.runtime, self.facts
        config, profile = runtime.config, runtime.state.calibration
        document = Calibration(source="default depth", detail=facts.calibration_detail)
        if profile is not None:
            document = Calibration(
                source="default depth",
                file=facts.calibration_file,
                fingerprint=profile.fingerprint,
                model=profile.model,
                created_ts=profile.created_ts,
            )
        reads = config.policy.reads
        if config.probe.layers:
            document.source = "configured"
        elif reads is not None and profile is not None:
            of_kind = profile.of(reads.kind)
            document.source = "profile" if of_kind and of_kind.layers else "default depth"
        if reads is not None:
            signal = runtime.scoring.resolve(reads, config)
            document.signal = signal.kind
            document.layers, document.heads = [*signal.layers], [*signal.heads]
        return document

    def _canary(self) -> CanaryStatus | None:
        canary = self.runtime.canary
        on = self.runtime.config.canary.share > 0 or canary.used
        return canary.document() if on else None

    def _prices(self) -> RoundPrices:
        """The measured prices, and a round's cost and saving now.

        While holes have no price, a round saves nothing and the tables are not read.
        """
        runtime = self.runtime
        prices = runtime.prices
        estimate = runtime.pricer.estimate(runtime.config) if prices.hole_us else NOTHING
        worth = prices.worth(estimate)
        return RoundPrices(
            **prices.document(),
            saving_us=round(worth.saving_us, 1),
            cost_us=round(worth.cost_us, 1),
            loose_tokens=estimate.loose_tokens,
            moved_tokens=estimate.moved_tokens,
            requests=estimate.num_requests,
        )
