"""A worker without a model: a memory with one content key per slot, and mirrors of token tables.

A mirror is updated only from step plans and from what stock vLLM sends a worker: new requests with
their block tables, appended blocks, finished requests. After every step `execute` verifies what
attention would read: the slots of all live tokens hold the contents written for these tokens (I1),
and if the plan says `dense`, they are the front of the block table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.core.request_step import part_of, parts_of
from vtoken.core.protocol.mirror import BlockTables, Mirrors
from vtoken.core.protocol.step import StepPlan, WorkerReport

Content = Any
Scores = npt.NDArray[np.float32]


@dataclass
class StepMessage:
    """One step's message to the worker. `new`: block table and contents already cached."""

    plan: StepPlan
    gone: list[str] = field(default_factory=list)
    new: dict[str, tuple[list[int], list[Content]]] = field(default_factory=dict)
    appended: dict[str, list[int]] = field(default_factory=dict)
    writes: dict[str, list[Content]] = field(default_factory=dict)  # scheduled requests only
    rejected: dict[str, int] = field(default_factory=dict)  # of the newest tokens, after sampling


@dataclass
class Mirror:
    """One request on the worker. `slots`: id -> slot of live tokens; None while positional.

    `SimulatedWorker.product` has the mirrors of a real worker; both must agree.
    """

    blocks: list[int]
    contents: list[Content]  # by token id
    slots: dict[int, int] | None = None


def scores_of(request_id: str, num_tokens: int) -> Scores:
    """Synthetic accumulated attention [num_tokens], the same in every run."""
    rng = np.random.default_rng([*request_id.encode()])
    return rng.random(num_tokens, dtype=np.float32)


class SimulatedWorker:
    """Executes step messages in order; `sequential_copies` breaks copies, for controls.

    It reports `hole_us` per packed token and `copy_us` per copied token.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.memory: list[Content] = [None] * (num_blocks * block_size)
        self.host: dict[int, Content] = {}  # by host slot
        self.parked: dict[int, Content] = {}  # by host slot: what checked victims contained
        self.refuses_memory = False  # of the host
        self.mirrors: dict[str, Mirror] = {}
        self.product = Mirrors()
        self.sequential_copies = False
        self.hole_us = 0
        self.copy_us = 0
        self.takes_back = True  # rejected drafts, in the product's mirrors; for a control
        self.score: Callable[[str, int], Scores] = scores_of
        self.reads_checked = 0
        self.blocks_borrowed = 0

    def execute(self, message: StepMessage) -> WorkerReport:
        plan = message.plan
        before = self._retained(plan, old=True)
        self._note_parked(plan)
        copied = self.park_slots(plan)
        self.copy_slots(plan)
        self.restore_slots(plan)
        after = self._retained(plan, old=False)
        for request_id in message.gone:
            self.mirrors.pop(request_id, None)
        self.product.drop([*message.gone, *message.new])
        for request_id, (blocks, contents) in message.new.items():
            slots: dict[int, int] | None = {} if request_id in plan.requests.resumed else None
            self.mirrors[request_id] = Mirror(list(blocks), list(contents), slots)
        names = [*plan.requests.resumed]
        counts = np.array([part_of(plan.requests, name).num_tokens for name in names])
        self.product.start_dead(names, counts)
        names = [name for name in plan.requests.names if name not in self.product]
        if names:
            tables = BlockTables.of([self.mirrors[name].blocks for name in names])
            counts = np.array([part_of(plan.requests, name).num_tokens for name in names])
            self.product.place(names, counts, self.block_size, tables)
        self.product.apply(plan.requests)
        for request_id, part in parts_of(plan.requests).items():
            mirror = self.mirrors[request_id]
            assert len(mirror.contents) == part.num_tokens, "the mirror lost or gained tokens"
            slots = self.live_slots(mirror)
            for token in part.evicted.tolist():
                del slots[token]
            for token, slot in zip(part.moved_ids.tolist(), part.moved_slots.tolist(), strict=True):
                assert token in slots, "a dead token was moved"
                slots[token] = slot
            for token, slot in zip(
                part.restored_ids.tolist(), part.restored_slots.tolist(), strict=True
            ):
                assert token not in slots, "a live token was restored"
                slots[token] = slot
            if part.blocks is not None:
                mirror.blocks = list(part.blocks)
            mirror.slots = slots
        for request_id, blocks in message.appended.items():
            self.mirrors[request_id].blocks += blocks
        for request_id, contents in message.writes.items():
            self._write(request_id, contents, message)
        self._use_scratch(plan)
        self.attend(plan)
        self._reject(message.rejected)
        moved, packed = len(plan.source_slots), self._num_packed(plan)
        report = WorkerReport(plan.step, moved_tokens=moved, copy_us=self.copy_us * moved)
        report.packed_tokens, report.pack_us = packed, self.hole_us * packed
        report.parked_tokens, report.restored_tokens = copied, len(plan.restore_slots)
        report.park_us = self.copy_us * copied
        if copied < len(plan.park_slots):
            report.park_fault = "no memory"
        report.verified_relocations = len(after)
        for request_id, contents in after.items():
            if contents != before[request_id]:
                report.violation = f"relocation of {request_id}: a retained token changed"
        if self._num_changed(plan):
            report.violation = "a restored token changed in host memory"
        for request_id, signal in plan.want_scores:
            assert signal in plan.signals[request_id]
            assert signal.layers
            num_tokens = len(self.mirrors[request_id].contents)
            report.scores[request_id, signal] = self.score(request_id, num_tokens)
        return report

    def _note_parked(self, plan: StepPlan) -> None:
        """Keep the contents of checked victims before anything is copied."""
        checked = {h for copies in plan.checked_parks.values() for h in copies.hosts.tolist()}
        for slot, host in zip(plan.park_slots.tolist(), plan.park_hosts.tolist(), strict=True):
            self.parked.pop(host, None)
            if host in checked:
                self.parked[host] = self.memory[slot]

    def _num_changed(self, plan: StepPlan) -> int:
        """How many restored tokens, of those that were checked, do not contain what they did."""
        pairs = zip(plan.restore_hosts.tolist(), plan.restore_slots.tolist(), strict=True)
        checked = [(host, slot) for host, slot in pairs if host in self.parked]
        return sum(self.parked[host] != self.memory[slot] for host, slot in checked)

    def _reject(self, rejected: dict[str, int]) -> None:
        """Take back the newest tokens."""
        if self.takes_back:
            self.product.truncate(rejected)
        for request_id, num in rejected.items():
            mirror = self.mirrors[request_id]
            kept = len(mirror.contents) - num
            mirror.contents = mirror.contents[:kept]
            if mirror.slots is not None:
                mirror.slots = {t: slot for t, slot in mirror.slots.items() if t < kept}

    def _num_packed(self, plan: StepPlan) -> int:
        """Packed tokens: with borrowed blocks those of partial blocks, else all of the request."""
        packed = 0
        for name, part in parts_of(plan.requests).items():
            if part.dense or not len(part.new_slots):
                continue
            packed += part.num_live
            if part.scratch:
                slots = self.live_slots(self.mirrors[name]).values()
                held = Counter(slot // self.block_size for slot in slots)
                full = sum(n == self.block_size for n in held.values())
                packed -= full * self.block_size
        return packed

    def _retained(self, plan: StepPlan, *, old: bool) -> dict[str, dict[int, Content]]:
        """Contents by id of tokens retained by verified relocations, at their old or new slots."""
        out = {}
        for request_id, part in parts_of(plan.requests).items():
            if part.retained is None:
                continue
            ids, slots = part.retained.ids.tolist(), part.retained.slots.tolist()
            places = dict(zip(ids, slots, strict=True))
            if old:
                places = self.live_slots(self.mirrors[request_id])
                for token in part.evicted.tolist():
                    del places[token]
            out[request_id] = {token: self.memory[slot] for token, slot in places.items()}
        return out

    def live_slots(self, mirror: Mirror) -> dict[int, int]:
        """id -> slot of every live token."""
        if mirror.slots is not None:
            return dict(mirror.slots)
        s = self.block_size
        return {t: mirror.blocks[t // s] * s + t % s for t in range(len(mirror.contents))}

    def copy_slots(self, plan: StepPlan) -> None:
        pairs = list(zip(plan.source_slots.tolist(), plan.destination_slots.tolist(), strict=True))
        if self.sequential_copies:
            for source, destination in pairs:
                self.memory[destination] = self.memory[source]
            return
        gathered = [self.memory[source] for source, _ in pairs]
        for (_, destination), content in zip(pairs, gathered, strict=True):
            self.memory[destination] = content

    def park_slots(self, plan: StepPlan) -> int:
        """Park the step's victims; returns how many."""
        if self.refuses_memory:
            return 0
        for slot, host in zip(plan.park_slots.tolist(), plan.park_hosts.tolist(), strict=True):
            assert host < plan.park_capacity
            self.host[host] = self.memory[slot]
        return len(plan.park_slots)

    def restore_slots(self, plan: StepPlan) -> None:
        pairs = zip(plan.restore_hosts.tolist(), plan.restore_slots.tolist(), strict=True)
        for host, slot in pairs:
            self.memory[slot] = self.host[host]

    def _write(self, request_id: str, contents: list[Content], message: StepMessage) -> None:
        mirror = self.mirrors[request_id]
        first, s = len(mirror.contents), self.block_size
        mirror.contents += contents
        if mirror.slots is None:
            ids = range(first, len(mirror.contents))
            new_slots = [mirror.blocks[t // s] * s + t % s for t in ids]
        else:
            new_slots = part_of(message.plan.requests, request_id).new_slots.tolist()
            mirror.slots |= zip(range(first, len(mirror.contents)), new_slots, strict=True)
        assert all(slot // s in mirror.blocks for slot in new_slots), "written out of the table"
        for slot, content in zip(new_slots, contents, strict=True):
            self.memory[slot] = content

    def _use_scratch(self, plan: StepPlan) -> None:
        """Overwrite every borrowed block: none may contain anything read or cached."""
        borrowed = [block for part in parts_of(plan.requests).values() for block in part.scratch]
        assert len(set(borrowed)) == len(borrowed), "a block was borrowed twice"
        for request_id, part in parts_of(plan.requests).items():
            if not part.scratch:
                continue
            assert not part.dense
            places = [
                slot // self.block_size
                for slot in self.live_slots(self.mirrors[request_id]).values()
            ]
            full = sum(held == self.block_size for held in Counter(places).values())
            partial = len(places) - full * self.block_size
            assert partial <= len(part.scratch) * self.block_size, "too few borrowed blocks"
            row = self.product.rows_of([request_id])
            full_blocks, partial_slots = self.product.split(row, self.block_size)
            packed = {
                slot
                for b in full_blocks.values.tolist()
                for slot in range(b * self.block_size, (b + 1) * self.block_size)
            }
            assert len(full_blocks.values) == full
            assert len(partial_slots.values) == partial
            assert packed | {*partial_slots.values.tolist()} == {
                *self.live_slots(self.mirrors[request_id]).values()
            }, "attention reads other tokens"
        for block in borrowed:
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                self.memory[slot] = "scratch"
            self.blocks_borrowed += 1

    def attend(self, plan: StepPlan) -> None:
        s, parts = self.block_size, parts_of(plan.requests)
        for request_id, mirror in self.mirrors.items():
            slots = self.live_slots(mirror)
            for token, slot in slots.items():
                self.reads_checked += 1
                assert self.memory[slot] == mirror.contents[token], (
                    f"I1: {request_id} token {token}: slot {slot} holds {self.memory[slot]}, "
                    f"not {mirror.contents[token]}"
                )
            assert len(set(slots.values())) == len(slots), f"I2: {request_id} shares a slot"
            part = parts.get(request_id)
            if part is not None:
                assert part.num_live == len(slots)
                ids, places = self.product[request_id].live()
                assert dict(zip(ids.tolist(), places.tolist(), strict=True)) == slots
                front = {mirror.blocks[i // s] * s + i % s for i in range(len(slots))}
                assert part.dense == (front == set(slots.values()))
