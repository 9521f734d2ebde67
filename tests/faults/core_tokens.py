"""Faults in what is copied and mapped (I1, I2, I3), in the mirror and in the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import structs
from msgspec.structs import replace

from tests.faults.catalogue import Catalogue, Hit
from tests.faults.core import each_plan, each_relocation, swapped, without_firsts
from tests.support.core.harness import CoreEngine
from vtoken.policies import Policy

TOKENS = Catalogue()


@TOKENS.fault("I1 identity", "I1, `Runtime.finish_step`")
def exchange_copies(engine: CoreEngine, hit: Hit) -> None:
    """Two tokens of a relocation are copied to each other's place."""

    def change(plan: Any) -> bool:
        if len(plan.destination_slots) < 2:
            return False
        plan.destination_slots = swapped(plan.destination_slots)
        return True

    each_plan(engine, change, hit)


@TOKENS.fault("I1 content", "I1, `Runtime.finish_step`")
def spoil_a_retained_token(engine: CoreEngine, hit: Hit) -> None:
    """A copy overwrites a live token that does not move."""
    copy = engine.worker.copy_slots

    def copy_and_spoil(plan: Any) -> None:
        copy(plan)
        for retained in plan.requests.retained.values():
            engine.worker.memory[retained.slots[0]] = "spoilt"
            hit()

    engine.worker.copy_slots = copy_and_spoil  # type: ignore[method-assign]


@TOKENS.fault("I3 visibility", "I1, `Runtime.finish_step`")
def copy_a_step_late(engine: CoreEngine, hit: Hit) -> None:
    """The copies run after the attention that reads their result."""
    copy, held = engine.worker.copy_slots, []

    def copy_late(plan: Any) -> None:
        while held:
            copy(held.pop())
        if len(plan.source_slots):
            held.append(plan)
            hit()

    engine.worker.copy_slots = copy_late  # type: ignore[method-assign]


@TOKENS.fault("I3 completeness", "I3, `Runtime._check_copies`")
def lose_a_copy(engine: CoreEngine, hit: Hit) -> None:
    """One copy of a plan is lost on the way to the worker."""

    def change(plan: Any) -> bool:
        plan.source_slots = plan.source_slots[1:]
        plan.destination_slots = plan.destination_slots[1:]
        return len(plan.source_slots) > 0

    each_plan(engine, change, hit)


@TOKENS.fault("I3 completeness", "I3, `Runtime._check_copies`")
def lose_a_report(engine: CoreEngine, hit: Hit) -> None:
    """The report of a step with copies never arrives."""
    finish = engine.runtime.finish_step

    def finish_step(report: Any, step: int) -> None:
        if report.moved_tokens:
            hit()
            report = None
        finish(report, step)

    engine.runtime.finish_step = finish_step  # type: ignore[method-assign]


@TOKENS.fault("I3 order", "I3, `Runtime._check_copies`")
def stale_report(engine: CoreEngine, hit: Hit) -> None:
    """The report of an earlier step is used for this step."""
    finish, earlier = engine.runtime.finish_step, []

    def finish_step(report: Any, step: int) -> None:
        earlier.append(report)
        if len(earlier) > 1:
            hit()
        finish(earlier[-2] if len(earlier) > 1 else report, step)

    engine.runtime.finish_step = finish_step  # type: ignore[method-assign]


@TOKENS.fault("I2 unique mapping", "I2, `TokenTables._refuse`")
def double_a_destination(engine: CoreEngine, hit: Hit) -> None:
    """A plan sends two tokens to one slot."""

    def change(plan: Any) -> Any:
        if plan.num_moved_tokens < 2:
            return None
        slots = plan.destination_slots.copy()
        slots[1] = slots[0]
        return replace(plan, destination_slots=slots)

    each_relocation(engine, change, hit)


@TOKENS.fault("I2 unique mapping", "I2, `TokenTables._refuse`")
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


@TOKENS.fault("I1 identity", "I1, ")
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


@TOKENS.fault("I2 counts", "I2, `PoolLiveness.check`")
def miscount_a_block(engine: CoreEngine, hit: Hit) -> None:
    """A block's live count loses one."""
    table = next(iter(engine.runtime.tables))
    engine.runtime.tables.pool.live[table.blocks[0]] -= 1
    hit()


@TOKENS.fault("I2 counts", "I2, ")
def miscount_a_table(engine: CoreEngine, hit: Hit) -> None:
    """A table's live count gains one: a lost update."""
    tables = engine.runtime.tables
    tables.columns.num_live[next(iter(tables)).row] += 1
    hit()


@TOKENS.fault("I2 counts", "I2, ")
def lose_a_reader(engine: CoreEngine, hit: Hit) -> None:
    """The pool forgets one reader of a shared slot."""
    pool = engine.runtime.tables.pool
    slot = int(np.argmax(pool.readers))
    pool.readers[slot] -= 1
    hit()


@TOKENS.fault("mirror", "mirror, `Mirrors._change`")
def lose_an_eviction(engine: CoreEngine, hit: Hit) -> None:
    """The plan to the worker omits one victim."""

    def change(plan: Any) -> bool:
        plan.requests.evicted, changed = without_firsts(plan.requests.evicted)
        return changed

    each_plan(engine, change, hit)


def _choose(engine: CoreEngine, hit: Hit, victims: Callable[[Any], Any]) -> None:
    class Wrong(Policy):
        name = "wrong"

        def select_victims(self, view: Any) -> Any:
            hit()
            return victims(view)

    def suspend(_policy: Policy, error: Exception) -> None:
        raise error  # the product would continue without evicting

    engine.runtime.ranking._suspend = suspend
    engine.runtime.active.config = structs.replace(engine.runtime.config, policy=Wrong())


@TOKENS.fault("policy", "policy, `checked`")
def evict_the_newest(engine: CoreEngine, hit: Hit) -> None:
    """The policy names the newest token."""
    _choose(engine, hit, lambda view: view.token_ids[-view.num_victims :])


@TOKENS.fault("policy", "policy, `checked`")
def evict_too_few(engine: CoreEngine, hit: Hit) -> None:
    """The policy names fewer victims than are due."""
    _choose(engine, hit, lambda view: view.token_ids[: view.num_victims - 1])


@TOKENS.fault("policy", "policy, `checked`")
def evict_one_twice(engine: CoreEngine, hit: Hit) -> None:
    """The policy names one victim twice."""
    _choose(engine, hit, lambda view: np.repeat(view.token_ids[:1], view.num_victims))


@TOKENS.fault("policy", "policy, `checked`")
def evict_unknown_ids(engine: CoreEngine, hit: Hit) -> None:
    """The policy names tokens that do not exist."""
    _choose(engine, hit, lambda view: view.token_ids[: view.num_victims] + 10_000)


def _reject_drafts(engine: CoreEngine, hit: Hit) -> None:
    """Two of three drafts are wrong from now on."""

    def draft(_: object) -> tuple[int, int]:
        hit()
        return 3, 1

    engine.draft = draft


@TOKENS.fault("rejected drafts", "mirror, `Mirrors._change`", max_drafts=3)
def keep_rejected_drafts_in_the_mirror(engine: CoreEngine, hit: Hit) -> None:
    """The worker does not take back the drafts that were rejected."""
    engine.worker.takes_back = False
    _reject_drafts(engine, hit)


@TOKENS.fault("rejected drafts", "I4, `Runtime.check_lengths`", max_drafts=3)
def keep_rejected_drafts_in_the_table(engine: CoreEngine, hit: Hit) -> None:
    """The scheduler does not take back the drafts that were rejected."""
    engine.runtime.truncate = lambda _: None  # type: ignore[method-assign]
    _reject_drafts(engine, hit)
