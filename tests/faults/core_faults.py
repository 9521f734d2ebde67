"""Faults in the scheduler's half: injected into the core engine of the tests, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.core.harness import CoreEngine
from tests.core.test_rules import EagerlyFreeingStore, GreedyLender
from tests.faults.catalogue import Catalogue, Fault, Hit, Noticed, noticed
from vtoken import reclaim, relocation
from vtoken.policies import Policy

CORE = Catalogue()
MOST_STEPS = 400
NUM_BLOCKS = 32


def run_core_fault(fault: Fault) -> Noticed | None:
    """Inject it under traffic; None when neither a check nor the oracle notices."""
    for watched in (False, True):
        found = _run(fault, watched=watched)
        if found is not None:
            return found
    return None


def _run(fault: Fault, *, watched: bool) -> Noticed | None:
    options = dict(fault.options)
    config = {
        "policy": {"name": "random", "params": {"recent": 2, "sinks": 1}},
        "budget_tokens": 10,
        "interval_tokens": 4,
        "low_watermark_blocks": NUM_BLOCKS,
        "theta_f": 0.0,
        "headroom_blocks": 4,
        "recycle": False,
    } | options.pop("config", {})
    engine = CoreEngine(num_blocks=NUM_BLOCKS, block_size=4, config=config, **options)
    hit = Hit(lambda: engine.runtime.step)
    if not watched:
        engine.worker._attend = lambda _: None  # type: ignore[method-assign]
    with ExitStack() as stack:
        engine.stack = stack  # type: ignore[attr-defined]
        _feed(engine, 0)
        for _ in range(4):
            engine.step()
        fault.inject(engine, hit)
        try:
            for number in range(1, MOST_STEPS):
                if len(engine.running) + len(engine.waiting) < 4:
                    _feed(engine, number)
                engine.step()
                if watched:
                    engine.check()
        except Exception as error:
            return noticed(error, hit)
    assert hit.times, f"{fault.name}: never injected"
    return None


def _feed(engine: CoreEngine, wave: int) -> None:
    for i in range(4):
        engine.add(f"w{wave}-{i}", 19, prefix="p", prefix_tokens=9, max_tokens=40, seed=i)


def each_plan(engine: CoreEngine, change: Callable[[Any], bool], hit: Hit) -> None:
    """Every step plan on its way to the worker; `change` says whether it did damage."""
    commit = engine.runtime.commit_step

    def commit_step(grown: Any) -> Any:
        plan = commit(grown)
        if change(plan):
            hit()
        return plan

    engine.runtime.commit_step = commit_step  # type: ignore[method-assign]


def each_relocation(engine: CoreEngine, change: Callable[[Any], Any], hit: Hit) -> None:
    """Every relocation plan between planner and table; `change` gives another one, or None."""
    honest = reclaim.plan_round

    def plan_round(*args: Any, **kwargs: Any) -> Any:
        found = honest(*args, **kwargs)
        plans = []
        for plan in found.plans:
            changed = change(plan)
            if changed is not None:
                hit()
            plans.append(plan if changed is None else changed)
        return replace(found, plans=tuple(plans))

    engine.stack.enter_context(  # type: ignore[attr-defined]
        patch.object(relocation, "plan_round", plan_round)
    )


def swapped(array: Any) -> Any:
    out = array.copy()
    out[[0, 1]] = out[[1, 0]]
    return out


# ---------------------------------------------------------------- I1, I3: what is copied, and when


@CORE.fault("I1 identity", "I1, `Runtime.finish_step`")
def exchange_copies(engine: CoreEngine, hit: Hit) -> None:
    """Two tokens of a relocation are copied to each other's place."""

    def change(plan: Any) -> bool:
        if len(plan.destination_slots) < 2:
            return False
        plan.destination_slots = swapped(plan.destination_slots)
        return True

    each_plan(engine, change, hit)


@CORE.fault("I1 content", "I1, `Runtime.finish_step`")
def spoil_a_retained_token(engine: CoreEngine, hit: Hit) -> None:
    """A copy overwrites a live token that does not move."""
    copy = engine.worker._copy

    def copy_and_spoil(plan: Any) -> None:
        copy(plan)
        for part in plan.requests.values():
            if part.retained is not None:
                engine.worker.memory[part.retained.slots[0]] = "spoilt"
                hit()

    engine.worker._copy = copy_and_spoil  # type: ignore[method-assign]


@CORE.fault("I3 visibility", "I1, `Runtime.finish_step`")
def copy_a_step_late(engine: CoreEngine, hit: Hit) -> None:
    """The copies run after the attention that reads their result."""
    copy, held = engine.worker._copy, []

    def copy_late(plan: Any) -> None:
        while held:
            copy(held.pop())
        if len(plan.source_slots):
            held.append(plan)
            hit()

    engine.worker._copy = copy_late  # type: ignore[method-assign]


@CORE.fault("I3 completeness", "I3, `Runtime._check_copies`")
def lose_a_copy(engine: CoreEngine, hit: Hit) -> None:
    """One copy of a plan is lost on the way to the worker."""

    def change(plan: Any) -> bool:
        plan.source_slots = plan.source_slots[1:]
        plan.destination_slots = plan.destination_slots[1:]
        return len(plan.source_slots) > 0

    each_plan(engine, change, hit)


@CORE.fault("I3 completeness", "I3, `Runtime._check_copies`")
def lose_a_report(engine: CoreEngine, hit: Hit) -> None:
    """The report of a step with copies never arrives."""
    finish = engine.runtime.finish_step

    def finish_step(report: Any, step: int) -> None:
        if report.moved_tokens:
            hit()
            report = None
        finish(report, step)

    engine.runtime.finish_step = finish_step  # type: ignore[method-assign]


@CORE.fault("I3 order", "I3, `Runtime._check_copies`")
def stale_report(engine: CoreEngine, hit: Hit) -> None:
    """The report of an earlier step is taken for this one's."""
    finish, earlier = engine.runtime.finish_step, []

    def finish_step(report: Any, step: int) -> None:
        earlier.append(report)
        if len(earlier) > 1:
            hit()
        finish(earlier[-2] if len(earlier) > 1 else report, step)

    engine.runtime.finish_step = finish_step  # type: ignore[method-assign]


# ---------------------------------------------------------------- I2: the mapping


@CORE.fault("I2 unique mapping", "I2, `rebuild`")
def double_a_destination(engine: CoreEngine, hit: Hit) -> None:
    """A plan sends two tokens to one slot."""

    def change(plan: Any) -> Any:
        if plan.num_moved_tokens < 2:
            return None
        slots = plan.destination_slots.copy()
        slots[1] = slots[0]
        return replace(plan, destination_slots=slots)

    each_relocation(engine, change, hit)


@CORE.fault("I2 unique mapping", "I2, `rebuild`")
def land_on_a_live_token(engine: CoreEngine, hit: Hit) -> None:
    """A plan sends a token to the slot of a live one that stays."""

    def change(plan: Any) -> Any:
        table = engine.runtime.tables[plan.request_id]
        ids = table.live_ids()
        staying = ids[~np.isin(ids, plan.token_ids)]
        slots = table.slots_of(staying)
        private = [engine.store.is_writable(block) for block in (slots // 4).tolist()]
        slots = slots[private & ~np.isin(slots // 4, plan.source_blocks)]
        if plan.num_moved_tokens == 0 or len(slots) == 0:
            return None
        destinations = plan.destination_slots.copy()
        destinations[0] = slots[0]
        return replace(plan, destination_slots=destinations)

    each_relocation(engine, change, hit)


@CORE.fault("I1 identity", "I1, ")
def move_a_dead_token(engine: CoreEngine, hit: Hit) -> None:
    """A plan moves a token that was evicted meanwhile."""

    def change(plan: Any) -> Any:
        table = engine.runtime.tables[plan.request_id]
        dead = np.setdiff1d(np.arange(table.num_tokens), table.live_ids())
        if plan.num_moved_tokens == 0:
            return None
        ids = plan.token_ids.copy()
        ids[0] = dead[0]
        return replace(plan, token_ids=ids)

    each_relocation(engine, change, hit)


@CORE.fault("I2 counts", "I2, `PoolLiveness.check`")
def miscount_a_block(engine: CoreEngine, hit: Hit) -> None:
    """A block's live count loses one."""
    table = next(iter(engine.runtime.tables))
    engine.runtime.tables.pool.live[table.blocks[0]] -= 1
    hit()


@CORE.fault("I2 counts", "I2, ")
def miscount_a_table(engine: CoreEngine, hit: Hit) -> None:
    """A table's live count gains one: a lost update."""
    next(iter(engine.runtime.tables)).num_live += 1
    hit()


@CORE.fault("I2 counts", "I2, ")
def lose_a_reader(engine: CoreEngine, hit: Hit) -> None:
    """The pool forgets one reader of a shared slot."""
    pool = engine.runtime.tables.pool
    slot = int(np.argmax(pool.readers))
    pool.readers[slot] -= 1
    hit()


# ---------------------------------------------------------------- I4: planning and blocks


@CORE.fault("I4 snapshot", "I")
def plan_from_an_old_snapshot(engine: CoreEngine, hit: Hit) -> None:
    """The planner is shown a request as it was when it was first looked at."""
    relocator, old = engine.runtime.relocator, {}
    honest = relocator.layout_of

    def layout_of(table: Any, dead: Any = None) -> Any:
        now = honest(table, dead)
        layout = old.setdefault(table.request_id, now)
        if layout is not now and layout.grid.tolist() != now.grid.tolist():
            hit()
        return layout

    relocator.layout_of = layout_of  # type: ignore[method-assign]


@CORE.fault("I4 profitable", "I4, `Relocator._apply`")
def free_nothing(engine: CoreEngine, hit: Hit) -> None:
    """A plan takes as many fresh blocks as it frees."""

    def change(plan: Any) -> Any:
        more = len(plan.source_blocks) - plan.num_fresh_blocks
        first = plan.num_fresh_blocks
        return replace(
            plan,
            num_fresh_blocks=first + more,
            blocks=(*plan.blocks, *(-1 - first - i for i in range(more))),
        )

    each_relocation(engine, change, hit)


@CORE.fault("I4 one in flight", "I4, `Relocator._apply`", worker_lag_steps=2)
def relocate_twice(engine: CoreEngine, hit: Hit) -> None:
    """A request is relocated again before its relocation was reported."""
    relocator, states = engine.runtime.relocator, engine.runtime.states
    honest = relocator.layouts

    def layouts(request_ids: Any = None) -> Any:
        flying = {name: s.in_flight_step for name, s in states.items() if s.in_flight_step}
        for name in flying:
            states[name].in_flight_step = 0
        found = list(honest(request_ids))
        for name, step in flying.items():
            states[name].in_flight_step = step
            hit()
        return found

    relocator.layouts = layouts  # type: ignore[method-assign]


def _lie_to_the_planner(engine: CoreEngine, hit: Hit) -> None:
    relocator = engine.runtime.relocator
    honest = relocator.layout_of

    def layout_of(table: Any, dead: Any = None) -> Any:
        layout = honest(table, dead)
        if not layout.writable.all():
            hit()
        return replace(layout, writable=np.ones_like(layout.writable))

    relocator.layout_of = layout_of  # type: ignore[method-assign]


@CORE.fault("I4 private destination", "I4, `Relocator._apply`")
def plan_into_shared_blocks(engine: CoreEngine, hit: Hit) -> None:
    """The planner believes that hashed and shared blocks may be written."""
    _lie_to_the_planner(engine, hit)


@CORE.fault("I4 private destination", "I4, `Relocator._check_one_pass`")
def believe_every_block_writable(engine: CoreEngine, hit: Hit) -> None:
    """`is_writable` always says yes: two requests move into one shared block."""
    honest = engine.store.is_writable

    def is_writable(block: int) -> bool:
        if not honest(block):
            hit()
        return True

    engine.store.is_writable = is_writable  # type: ignore[method-assign]


@CORE.fault(
    "write private blocks",
    "wrong contents are read",
    config={"reclamation": "paused", "recycle": True},
)
def recycle_shared_slots(engine: CoreEngine, hit: Hit) -> None:
    """`is_writable` always says yes and slots are recycled: the rule itself switched off."""
    believe_every_block_writable(engine, hit)


@CORE.fault(
    "write private blocks",
    "I4, `Grower.",
    config={"reclamation": "paused", "recycle": True},
)
def recycle_read_only_slots(engine: CoreEngine, hit: Hit) -> None:
    """A token is recycled into a hashed block."""
    honest = engine.runtime.grower.pick_holes

    def pick_holes() -> None:
        for state in engine.runtime.states.values():
            if state.readonly:
                hit()
            state.readonly = frozenset()
        honest()

    engine.runtime.grower.pick_holes = pick_holes  # type: ignore[method-assign]


@CORE.fault(
    "freed blocks wait",
    "I4, `Relocator._check_one_pass`",
    config={"planner": "pack"},
    prefix_caching=False,
)
def free_inside_the_pass(engine: CoreEngine, hit: Hit) -> None:
    """Blocks that a plan empties are given back at once, and become destinations of the next."""
    engine.store.__class__ = EagerlyFreeingStore
    engine.store.already = set()  # type: ignore[attr-defined]
    rebind = engine.store.rebind

    def note(request_id: str, blocks: Any) -> None:
        if len(blocks) < len(engine.store.tables[request_id]):
            hit()
        rebind(request_id, blocks)

    engine.store.rebind = note  # type: ignore[method-assign]


@CORE.fault("drop with the request", "I4, `Relocator._check_one_pass`")
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


@CORE.fault("never hash again", "I4, `Grower.", config={"recycle": True})
def hash_after_an_eviction(engine: CoreEngine, hit: Hit) -> None:
    """Blocks are hashed although the request has evicted: written while cached."""
    engine.caches_after_eviction = True
    hit()


@CORE.fault("engine's books", "I4, `Runtime.check`")
def free_twice(engine: CoreEngine, hit: Hit) -> None:
    """A block is given back once more than it was taken."""
    engine.store.give_back([engine.store.tables[engine.running[-1].id][0]])
    hit()


@CORE.fault("engine's books", "I4, ")
def reorder_the_block_table(engine: CoreEngine, hit: Hit) -> None:
    """The engine's block table is in another order than the token table's."""
    engine.store.tables[engine.running[0].id].reverse()
    hit()


@CORE.fault("engine's books", "I4, ")
def allocate_too_little(engine: CoreEngine, hit: Hit) -> None:
    """The engine allocates a place less than it was told."""
    ask = engine.runtime.required_extent

    def required_extent(request_id: str, num_new: int) -> int | None:
        extent = ask(request_id, num_new)
        if extent is not None and extent % 4 == 1:
            hit()
        return None if extent is None else extent - 1

    engine.runtime.required_extent = required_extent  # type: ignore[method-assign]


@CORE.fault("lent blocks are free", "wrong contents are read", config={"reclamation": "off"})
def lend_cached_blocks(engine: CoreEngine, hit: Hit) -> None:
    """Free blocks that the prefix cache still needs are lent: the rule itself switched off."""
    engine.store.__class__ = GreedyLender
    lend = engine.store.lend

    def note(num_blocks: int) -> list[int]:
        lent = lend(num_blocks)
        if any(engine.store.hash[block] is not None for block in lent):
            hit()
        return lent

    engine.store.lend = note  # type: ignore[method-assign]


# ---------------------------------------------------------------- the worker's mirror, the policy


@CORE.fault("mirror", "mirror, `Mirror.apply`")
def lose_an_eviction(engine: CoreEngine, hit: Hit) -> None:
    """The worker is not told of one victim."""

    def change(plan: Any) -> bool:
        parts = [part for part in plan.requests.values() if len(part.evicted)]
        for part in parts:
            part.evicted = part.evicted[1:]
        return bool(parts)

    each_plan(engine, change, hit)


def _choose(engine: CoreEngine, hit: Hit, victims: Callable[[Any], Any]) -> None:
    class Wrong(Policy):
        name = "wrong"

        def select_victims(self, view: Any) -> Any:
            hit()
            return victims(view)

    engine.runtime.config = replace(engine.runtime.config, policy=Wrong())


@CORE.fault("policy", "policy, `Evictor.pick_victims`")
def evict_the_newest(engine: CoreEngine, hit: Hit) -> None:
    """The policy names the newest token."""
    _choose(engine, hit, lambda view: view.token_ids[-view.num_victims :])


@CORE.fault("policy", "policy, `Evictor.pick_victims`")
def evict_too_few(engine: CoreEngine, hit: Hit) -> None:
    """The policy names fewer victims than are due."""
    _choose(engine, hit, lambda view: view.token_ids[: view.num_victims - 1])


@CORE.fault("policy", "I2, `TokenTable.evict`")
def evict_one_twice(engine: CoreEngine, hit: Hit) -> None:
    """The policy names one victim twice."""
    _choose(engine, hit, lambda view: np.repeat(view.token_ids[:1], view.num_victims))


@CORE.fault("policy", "I2, `TokenTable.evict`")
def evict_strangers(engine: CoreEngine, hit: Hit) -> None:
    """The policy names tokens that do not exist."""
    _choose(engine, hit, lambda view: view.token_ids[: view.num_victims] + 10_000)
