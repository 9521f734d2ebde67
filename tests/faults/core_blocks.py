"""Faults in planning, block ownership and the engine's bookkeeping: I4 and the sharing rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from tests.faults.catalogue import Catalogue, Hit
from tests.faults.core import each_relocation
from tests.support.core.harness import CoreEngine, SimpleStore

BLOCKS = Catalogue()


class EagerlyFreeingStore(SimpleStore):
    """Returns dropped blocks immediately, inside the planning pass."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.already: set[int] = set()

    def rebind(self, request_id: str, blocks: Sequence[int]) -> None:
        left = [b for b in self.tables[request_id] if b not in set(blocks)]
        super().rebind(request_id, blocks)
        super().give_back(left)
        self.already |= set(left)

    def give_back(self, blocks: Sequence[int]) -> None:
        super().give_back([b for b in blocks if b not in self.already])
        self.already -= set(blocks)


class GreedyBorrower(SimpleStore):
    """Lends free blocks even if they are hashed."""

    def borrow(self, num_blocks: int) -> list[int]:
        return sorted(self.free, key=lambda block: self.hash[block] is None)[:num_blocks]


@BLOCKS.fault("I4 snapshot", "I")
def plan_from_an_old_snapshot(engine: CoreEngine, hit: Hit) -> None:
    """The planner gets the layout that a request had when it was first planned."""
    planner, old = engine.runtime.round_planner, {}
    original = planner._layout_of

    def layout_of(table: Any, *args: Any) -> Any:
        now = original(table, *args)
        layout = old.setdefault(table.request_id, now)
        if layout is not now and layout.grid.tolist() != now.grid.tolist():
            hit()
        return layout

    planner._layout_of = layout_of  # type: ignore[method-assign]


@BLOCKS.fault("I4 profitable", "I4, `Relocator._apply`")
def free_nothing(engine: CoreEngine, hit: Hit) -> None:
    """A plan takes as many fresh blocks as it frees."""

    def change(plan: Any) -> Any:
        more = len(plan.source_blocks) - plan.num_fresh_blocks
        first = plan.num_fresh_blocks
        return replace(
            plan,
            num_fresh_blocks=first + more,
            blocks=np.append(plan.blocks, -1 - first - np.arange(more)),
        )

    each_relocation(engine, change, hit)


@BLOCKS.fault(
    "I4 one in flight", "I4, `Relocator._apply`", worker_lag_steps=2, config={"batch_size": 1}
)
def relocate_twice(engine: CoreEngine, hit: Hit) -> None:
    """A request is relocated again before its relocation was reported."""
    planner, requests = engine.runtime.round_planner, engine.runtime.requests
    original = planner._layouts

    def layouts(*args: Any) -> Any:
        in_flight, rows = requests.due.in_flight, requests.tables.all_rows
        steps = in_flight[rows]
        in_flight[rows] = 0
        found = list(original(*args))
        in_flight[rows] = steps
        for _ in range(np.count_nonzero(steps)):
            hit()
        return found

    planner._layouts = layouts  # type: ignore[method-assign]


def _mark_all_writable(engine: CoreEngine, hit: Hit) -> None:
    planner = engine.runtime.round_planner
    original = planner._layout_of

    def layout_of(table: Any, *args: Any) -> Any:
        layout = original(table, *args)
        if not layout.writable.all():
            hit()
        return replace(layout, writable=np.ones_like(layout.writable))

    planner._layout_of = layout_of  # type: ignore[method-assign]


@BLOCKS.fault("I4 private destination", "I4, `Relocator._apply`")
def plan_into_shared_blocks(engine: CoreEngine, hit: Hit) -> None:
    """The planner treats hashed and shared blocks as writable."""
    _mark_all_writable(engine, hit)


@BLOCKS.fault("I4 private destination", "I4, `Relocator._check_one_pass`")
def treat_every_block_as_writable(engine: CoreEngine, hit: Hit) -> None:
    """`is_writable` always returns true: two requests move into one shared block."""
    engine.store.is_writable = lambda _: True  # type: ignore[method-assign]
    _mark_all_writable(engine, hit)


@BLOCKS.fault(
    "write private blocks",
    "wrong contents are read",
    config={"reclamation": "paused", "recycle": True},
)
def recycle_shared_slots(engine: CoreEngine, hit: Hit) -> None:
    """`is_writable` always returns true and slots are recycled: the rule is switched off."""
    original = engine.store.is_writable

    def is_writable(block: int) -> bool:
        if not original(block):
            hit()
        return True

    engine.store.is_writable = is_writable  # type: ignore[method-assign]


@BLOCKS.fault(
    "write private blocks",
    "I4, `TokenAppender.",
    config={"reclamation": "paused", "recycle": True},
)
def recycle_read_only_slots(engine: CoreEngine, hit: Hit) -> None:
    """A token is recycled into a hashed block."""
    original = engine.runtime.appender.choose_places

    def choose_places() -> bool:
        for table in engine.runtime.tables:
            if table.readonly.any():
                hit()
            table.protect(())
        return original()

    engine.runtime.appender.choose_places = choose_places  # type: ignore[method-assign]


@BLOCKS.fault(
    "freed blocks wait",
    "I4, `Relocator._check_one_pass`",
    config={"experiment": {"planner": "pack"}},
    prefix_caching=False,
)
def free_inside_the_pass(engine: CoreEngine, hit: Hit) -> None:
    """Blocks that a plan empties are freed at once and become destinations of the next plan."""
    engine.store.__class__ = EagerlyFreeingStore
    engine.store.already = set()  # type: ignore[attr-defined]
    rebind = engine.store.rebind

    def note(request_id: str, blocks: Any) -> None:
        if len(blocks) < len(engine.store.tables[request_id]):
            hit()
        rebind(request_id, blocks)

    engine.store.rebind = note  # type: ignore[method-assign]


@BLOCKS.fault("drop with the request", "I4, `Relocator._check_one_pass`")
def keep_the_plan_of_a_preempted_request(engine: CoreEngine, hit: Hit) -> None:
    """A request is preempted while its relocation is being scheduled, and the plan stays."""
    begin = engine.runtime.begin_step
    engine.runtime.relocator.drop = lambda _: None  # type: ignore[method-assign]

    def begin_step(ready: Any) -> None:
        begin(ready)
        if engine.running and engine.running[-1].id in engine.runtime.relocator.planned:
            hit()
            engine.preempt_newest()

    engine.runtime.begin_step = begin_step  # type: ignore[method-assign]


@BLOCKS.fault("never hash again", "I4, `TokenAppender.", config={"recycle": True})
def hash_after_an_eviction(engine: CoreEngine, hit: Hit) -> None:
    """Blocks are hashed although the request has evicted: written while cached."""
    engine.caches_after_eviction = True
    hit()


@BLOCKS.fault("engine's books", "I4, `Runtime.check`")
def free_twice(engine: CoreEngine, hit: Hit) -> None:
    """A block is freed once more than it was allocated."""
    engine.store.give_back([engine.store.tables[engine.running[-1].id][0]])
    hit()


@BLOCKS.fault("engine's books", "I4, ")
def reorder_the_block_table(engine: CoreEngine, hit: Hit) -> None:
    """The engine's block table is in another order than the token table's."""
    engine.store.tables[engine.running[0].id].reverse()
    hit()


@BLOCKS.fault("engine's books", "I4, ")
def allocate_too_little(engine: CoreEngine, hit: Hit) -> None:
    """The engine allocates one place less than required."""
    original = engine.runtime.required_extent

    def required_extent(request_id: str, num_tokens: int) -> int | None:
        extent = original(request_id, num_tokens)
        if extent is not None and extent % 4 == 1:
            hit()
        return None if extent is None else extent - 1

    engine.runtime.required_extent = required_extent  # type: ignore[method-assign]


@BLOCKS.fault("borrowed blocks are free", "wrong contents are read", config={"reclamation": "off"})
def borrow_cached_blocks(engine: CoreEngine, hit: Hit) -> None:
    """Free blocks that the prefix cache still needs are borrowed: the rule is switched off."""
    engine.store.__class__ = GreedyBorrower
    borrow = engine.store.borrow

    def note(num_blocks: int) -> list[int]:
        borrowed = borrow(num_blocks)
        if any(engine.store.hash[block] is not None for block in borrowed):
            hit()
        return borrowed

    engine.store.borrow = note  # type: ignore[method-assign]
